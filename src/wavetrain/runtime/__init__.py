"""The runtime: proven schedules run on torch.distributed."""
