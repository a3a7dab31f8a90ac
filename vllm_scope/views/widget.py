"""A widget that shows a view in a notebook, drawn by scope.js. The widget can show another view
instead.

Owns:  ScopeWidget, and `shown_live`.
Runs:  in a notebook's process. Needs anywidget: pip install vllm-scope[notebook].
From:  document.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_scope.errors import ConfigError
from vllm_scope.views.document import MODULE, STYLE

if TYPE_CHECKING:
    from vllm_scope.views.document import View

try:
    import anywidget
    import traitlets
except ImportError as error:
    raise ConfigError(
        "a widget needs the package anywidget; pip install 'vllm-scope[notebook]', or show the "
        "view in the notebook without a widget."
    ) from error

#: The shortest time between two drawings of a changing view is the longer of two times: _EVERY_S
#: seconds, and _REST times the duration of the last drawing.
_EVERY_S, _REST = 0.25, 10


class ScopeWidget(anywidget.AnyWidget):
    """A widget that shows a view in a notebook."""

    _esm = MODULE
    _css = STYLE
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, view: View) -> None:
        super().__init__(view=view.data())

    def show(self, view: View) -> None:
        """Replace the view by another view. The focus stays at the same place of the view, if the
        new view has an item there."""
        self.view = view.data()


@contextmanager
def shown_live(make: Callable[[], View]) -> Iterator[Callable[[], None]]:
    """Show a changing view in the output of the running cell. Yields a function that the caller
    must call after each change of the view. The view is drawn at most four times a second, and at
    the end of the `with` statement.

    Args:
        make: a function that returns the current view.
    """
    from IPython.display import display

    widget, due = make().widget(), 0.0
    display(widget)

    def changed() -> None:
        nonlocal due
        began = time.monotonic()
        if began >= due:
            widget.show(make())
            ended = time.monotonic()
            due = ended + max(_EVERY_S, _REST * (ended - began))

    try:
        yield changed
    finally:
        widget.show(make())
