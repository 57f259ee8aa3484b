"""Arguments that would make native code write outside of its arrays are refused, also where asserts are off."""

from __future__ import annotations

import subprocess
import sys

import pytest

from foretell.kernels.bounds import BoundsError
from foretell.kernels.native.library import library
from tests.waiting import TIMEOUT

from .overflows import OVERFLOWS

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler is here")


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_is_refused(name: str) -> None:
    with pytest.raises(BoundsError, match="native call refused; it needs"):
        OVERFLOWS[name]()


def test_an_overflow_is_refused_under_python_o() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-m", "tests.kernels.overflows"], capture_output=True, text=True, timeout=4 * TIMEOUT
    )
    assert (done.stdout.split(), done.returncode) == ([*OVERFLOWS], 0), done.stderr
