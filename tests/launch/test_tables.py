"""What a terminal shows of lines that are printed over each other."""

import io
import re

from launch.roles.start import progress_printer

WIDTH = 60


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The rows, as a terminal of ``WIDTH`` columns has them at the end."""
        rows = [""]
        column = 0
        for piece in re.findall(r"\x1b\[K|.", self.getvalue(), re.DOTALL):
            if piece == "\x1b[K":
                rows[-1] = rows[-1][:column]
            elif piece == "\r":
                column = 0
            elif piece == "\n" or column == WIDTH:
                rows.append("" if piece == "\n" else piece)
                column = len(rows[-1])
            else:
                rows[-1] = rows[-1][:column] + piece + rows[-1][column + 1 :]
                column += 1
        return rows


def test_a_counting_line_leaves_nothing_of_itself(monkeypatch):
    """Not on the line that is printed next, nor on a row for each second where it is longer than the terminal is wide."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    hint = f"starting 2 SGLang servers (their output: tandem logs {'runs/long' * 9})"
    with progress_printer(hint, still=f"starting {'servers ' * 9}") as show:
        for waited in range(1, 9):
            show(waited)
        assert terminal.screen()[-1].startswith("… still starting servers ")
    print("2 SGLang servers ready")
    assert "".join(terminal.screen()) == f"{hint} …2 SGLang servers ready"


def test_a_log_gets_ever_fewer_lines(monkeypatch, capsys):
    with progress_printer("starting", still="starting") as show:
        for waited in range(0, 600, 5):
            show(waited)
    assert capsys.readouterr().out.splitlines() == [
        "starting …",
        *(f"… still starting after {waited} s" for waited in (60, 120, 240, 480)),
    ]
