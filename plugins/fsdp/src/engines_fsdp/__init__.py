"""FSDP2 (`torch.distributed.fsdp.fully_shard`) behind the engines contract."""
