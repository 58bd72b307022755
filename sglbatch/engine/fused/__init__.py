"""Decoder layers with their projections, norms and activation fused, for architectures that have the plain shape."""
