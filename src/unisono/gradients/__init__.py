"""From gradients of micro-batches to one averaged gradient: buckets, partial sums, buffers, clipping."""
