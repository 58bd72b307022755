"""The order requests run in. The function lives beside the radix tree, which orders late submissions with it too."""

from sglbatch.engine.radix.order import depth_first_order, neighbour_lcp

__all__ = ["depth_first_order", "neighbour_lcp"]
