"""The heat map's colours: what colour distinguishes is distinguished by those who see colours otherwise, too."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

# In a browser.
pytestmark = pytest.mark.slow

# How colours look to those who lack one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1.0).
VISION = {
    "all cones": np.eye(3),
    "no long cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no middle cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no short cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)


def lab(rgb: list[int], vision: object) -> np.ndarray:
    """A colour as L*a*b*, where distances are about as they are seen."""
    values = np.array(rgb) / 255
    light = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    x, y, z = (TO_XYZ @ np.clip(np.array(vision) @ light, 0, 1)) / WHITE
    f = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.fixture(params=[False, True], ids=["light", "dark"])
def colours(request, tab, file) -> dict[int, list[int]]:
    """The colour of each code."""
    tab.open(file, dark=request.param)
    tab.wait("window.padiff && padiff.heat.frames.length")
    return {
        code: [int(part) for part in css[4:-1].split()]
        for code, css in enumerate(tab.run("padiff.heat.colours.css"))
        if css.startswith("rgb")
    }


@pytest.mark.parametrize("vision", VISION.values(), ids=VISION)
def test_kinds_of_cells_are_reported_apart(colours, vision):
    kinds = {"bit-equal": 2, "far below": 3, "at the limit": 127, "just beyond": 128, "far beyond": 254}
    seen = {name: lab(colours[code], vision) for name, code in kinds.items()}
    for one, other in combinations(kinds, 2):
        # 2.3 is the least that is seen of two colours side by side.
        assert np.linalg.norm(seen[one] - seen[other]) > 12, (one, other)


def test_each_scale_goes_one_way_in_lightness_so_that_grey_shows_it(colours):
    for start, end in ((3, 127), (128, 254)):
        lightness = [lab(colours[code], VISION["all cones"])[0] for code in range(start, end + 1)]
        steps = np.diff(lightness)
        assert np.all(steps <= 0.3) or np.all(steps >= -0.3)
