"""What LMCache calls GPU connectors, independent of it and working on any device's tensors."""
