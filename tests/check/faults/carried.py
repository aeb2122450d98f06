"""Fault: an attribute carries something from one forward pass to the next."""

from training import Net, train


class Smoothing(Net):
    previous = 0.0

    def forward(self, x):
        output = super().forward(x)
        smooth = output + 0.1 * self.previous
        self.previous = float(output.detach().mean())
        return smooth


train(build=Smoothing)
