"""A stand-in for MindSpeed, written for these tests: the same way in, patches of its own that can be observed.

What it shares with the real one: `megatron_adaptor` patches while it is imported and parses the program's command
line; `repatch(dict)` takes all patches out and puts in those that the arguments ask for; `patch_utils` lists the
patches; fake modules `transformer_engine` make Megatron-Core decide otherwise while it is imported; `torch.compile`
compiles nothing; configs carry the defaults of arguments, not what `repatch` was given; its AdamW counts steps by
parameter group.
"""

events: list[tuple[str, object]] = []
"""What happened, in order: ("imported", the command line it saw), ("repatch", arguments), ("groups", cp), ..."""
