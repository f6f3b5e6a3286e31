"""`engines verify`: whether installed engines train the same model."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command
@click.option(
    "--engine",
    "engines",
    metavar="BACKEND",
    multiple=True,
    help="An engine to verify, also backend@distribution; several times for several. Default: all that can run.",
)
@click.option("--against", metavar="BACKEND", help="The engine to compare with. Default: plain transformers.")
@click.option("--device", metavar="NAME", help="Where they run. Default: ENGINES_DEVICE, else cpu.")
@click.option("--model", metavar="PATH", type=click.Path(path_type=Path), help="A folder. Default: tiny models.")
@click.option(
    "--layouts",
    metavar="NAMES",
    default="auto",
    show_default=True,
    help="Names with commas between them, as in single,tp2; auto: each that an engine declares, up to 4 processes.",
)
@click.option("--steps", metavar="N", type=click.IntRange(1, 9999), default=3, show_default=True, help="Of training.")
@click.option("--json", "as_json", is_flag=True, help="The result as one object.")
@click.option("--html", "page", metavar="FILE", type=click.Path(path_type=Path), help="Write a page with curves.")
def verify(
    engines: tuple[str, ...],
    against: str | None,
    device: str | None,
    model: Path | None,
    layouts: str,
    steps: int,
    as_json: bool,
    page: Path | None,
) -> int:
    """Find out whether installed engines train the same model.

    Each runs the same weights and batches at several layouts; loss, gradient norm, weights and exported weights are
    compared. Exit code 0 if all agree within tolerances, 1 if any doesn't.
    """
    from engines.cli.packages import check_packages

    check_packages("verifying")
    from engines.verifying import Request, verify
    from engines.verifying.page import check_writable, write_page
    from engines.verifying.progress import Progress
    from engines.verifying.request import split_layouts
    from engines.verifying.table import print_report

    if page is not None:
        check_writable(page)
    request = Request(engines, against, device, model, split_layouts(layouts), steps)
    report = verify(request, Progress())
    if page is not None:
        write_page(report, page)
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        print_report(report)
    return 0 if report.passed else 1
