"""Communication-overlap compiler for sharded models under torch.compile."""
