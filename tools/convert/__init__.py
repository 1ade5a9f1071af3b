"""`scalec convert`: checkpoints to torch.distributed.checkpoint and back."""
