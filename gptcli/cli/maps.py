"""`trace --map`: its options, and what they come to."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptcli.cli.options import OutputOptions, came_from
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.report.maps import MapReport
    from gptcli.report.room import Room
    from gptcli.report.view import Attending
    from gptcli.run import Run

PICTURES = (".png", ".svg")
CELLS, SMALL_CELLS = 512, 96  # a side of a map in a picture: of one alone, of one among many
MAPS = 1024  # in a picture


@dataclass
class MapOptions:
    """What a map shows."""

    map_: Annotated[
        bool, typer.Option("--map", help="A heat map of the weights; of --head all, a grid.", rich_help_panel="Map")
    ] = False
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="A:B", help="Queries A to B-1.", rich_help_panel="Map")
    ] = None
    cols: Annotated[str | None, typer.Option("--cols", metavar="A:B", help="Keys A to B-1.", rich_help_panel="Map")] = (
        None
    )
    pool: Annotated[
        str | None,
        typer.Option(
            "--pool", metavar="N|max|mean", rich_help_panel="Map",
            help="Positions a cell; what shows of them: max, mean; both: 8,mean. [default: what fits, max]",
        ),
    ] = None  # fmt: skip
    scale: Annotated[Literal["linear", "log"], typer.Option(help="A weight's shade.", rich_help_panel="Map")] = "linear"
    drop_first: Annotated[
        bool, typer.Option("--drop-first", help="Leave out key 0, which often takes nearly all.", rich_help_panel="Map")
    ] = False

    def check(self, out: OutputOptions, beside: list[str]) -> None:
        """Refuses options that only a map has where none is drawn, and what stands in a map's way.

        beside: options given that say what else to show. Raises GptcliError.
        """
        if self.map_ and beside:
            raise GptcliError(f"--map and {beside[0]}", "each says what to show: give one")
        if self.map_:
            return
        for name in ("rows", "cols", "pool", "scale", "drop_first"):
            if came_from(name, "COMMANDLINE"):
                raise GptcliError(f"--{name.replace('_', '-')} without --map", "--map draws what it is about")
        pictures = [path for path in out.output or () if path.suffix in PICTURES]
        if pictures:
            raise GptcliError(f"-o {pictures[0]} without --map", "a picture is of a map: add --map", "output")

    def report(
        self,
        run: "Run",
        layers: list[int],
        heads: list[int],
        attending: "Attending",
        out: OutputOptions,
        memory: "Room",
    ) -> "MapReport":
        """The maps as they fit the terminal. Pictures that were asked for are written.

        Raises GptcliError where the maps don't fit into memory, the terminal or a picture.
        """
        from gptcli.render.maps import Frame
        from gptcli.render.screen import Screen
        from gptcli.report.maps import axes_of, map_reports, pooling_of, refuse_large
        from gptcli.report.patterns import Patterns

        screen, patterns = Screen(sys.stdout, out.color, out.digits), Patterns(run, attending)
        number, pooling = pooling_of(self.pool)
        rows, columns = axes_of(patterns, self.rows, self.cols, self.drop_first)
        pictures = [path for path in out.output or () if path.suffix in PICTURES]
        if pictures and len(layers) * len(heads) > MAPS:
            said = f"-o {pictures[0]}: {len(layers) * len(heads):,} maps are more than a picture holds ({MAPS:,})"
            raise GptcliError(said, "choose by --layer or --head", "output")
        several = len(layers) > 1 or len(heads) > 1
        sink = any(patterns.spec(layer).attention.sinks for layer in layers)
        frame = Frame(screen, rows, columns, patterns.queries, patterns.keys, sink, several)
        shown = not (out.quiet or out.json)
        sizes = [(frame.fitted() if number is None else frame.given(number, shown)).sizes]
        if pictures and number is None:
            most = SMALL_CELLS if several else CELLS
            sizes.append((rows.fitted(most), columns.fitted(most)))
        refuse_large(memory, patterns, layers, heads, sizes, out.full)
        reports = map_reports(patterns, layers, heads, sizes, pooling, self.scale, self.drop_first, out.full)
        for path in pictures:
            from gptcli.render.pictures import write_picture

            write_picture(path, reports[-1])
        return reports[0]
