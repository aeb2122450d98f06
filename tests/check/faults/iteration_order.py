"""Fault: a set of strings decides the order of columns."""

from training import train

names = {"age", "height", "income", "price", "rooms", "weight"}


def order():
    return [sorted(names).index(name) for name in names]


train(order=order)
