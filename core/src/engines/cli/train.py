"""`engines train`."""

from __future__ import annotations

import click


class _RecipeCommand(click.Command):
    """A command whose help ends with the keys of a recipe, and whose overrides bear no dashes."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if "." not in error.option_name:
                raise
            said = f"{error.message} Overrides bear no dashes: {error.option_name.lstrip('-')}=VALUE."
            raise click.NoSuchOption(error.option_name, said, ctx=error.ctx) from None

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from engines.recipes.reference import key_table

        for section, rows in key_table().items():
            with formatter.section(section):
                formatter.write_dl(rows)


@click.command(cls=_RecipeCommand, short_help="Run a recipe.")
@click.argument("recipe", nargs=-1, required=True, metavar="RECIPE.yaml [KEY=VALUE]...")
def train(recipe: tuple[str, ...]) -> int:
    """Train as RECIPE.yaml says.

    Several files are laid over each other, and KEY=VALUE over all of them: trainer.steps=20. Relative paths are
    relative to the working directory. Runs as it is, or as one rank of many under torchrun.

    Ctrl-C or SIGTERM: the step is finished, a checkpoint saved, and the same command goes on from there. A second
    one ends the run at once; what was saved before stays.
    """
    from engines.cli.packages import check_packages
    from engines.errors import ConfigError
    from engines.recipes.layering import split_arguments

    check_packages("training")
    from engines.recipes.sft.train import train as train_sft

    files, overrides = split_arguments(recipe)
    if not files:
        raise ConfigError("no recipe file is given, only overrides", "engines train RECIPE.yaml KEY=VALUE ...")
    return train_sft(files, overrides)
