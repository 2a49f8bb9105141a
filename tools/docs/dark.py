"""Write variants of the README's plots for dark pages.

    python tools/docs/dark.py

The README is also read on sites that do not load the style sheet of this site. Its plots therefore
have variants in files, which look as `static/dark.css` makes plots look: brightness is inverted,
hues stay, and the background is transparent.
"""

from pathlib import Path

import numpy as np
from PIL import Image

HERE = Path(__file__).parent
PLOTS = ("digits", "slow-link")
"""Names of the plots, without ".png"."""
HUE_ROTATION = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
"""Matrix of the CSS filter `hue-rotate(180deg)`, for columns (red, green, blue)."""
COLORS = 128
"""Number of colours in a file, so that it stays small."""


def dark(plot: Image.Image) -> Image.Image:
    """Return a plot on a white background as a plot on a transparent background for dark pages.

    Colours are inverted, and their hues restored. The largest component of a new pixel is its
    opacity, and its colour is divided by this component, so that white becomes transparent.
    """
    page = Image.new("RGBA", plot.size, "white")
    page.alpha_composite(plot.convert("RGBA"))
    inverted = 1 - np.asarray(page.convert("RGB"), np.float64) / 255
    colors = np.clip(inverted @ HUE_ROTATION.T, 0, 1)
    opacity = colors.max(axis=2, keepdims=True)
    colors = np.divide(colors, opacity, out=np.zeros_like(colors), where=opacity > 0)
    pixels = np.concatenate([colors, opacity], axis=2)
    image = Image.fromarray(np.rint(255 * pixels).astype(np.uint8), "RGBA")
    return image.quantize(COLORS, method=Image.Quantize.FASTOCTREE)


def main() -> None:
    """Write `NAME-dark.png` for each of the plots."""
    for name in PLOTS:
        dark(Image.open(HERE / f"{name}.png")).save(HERE / f"{name}-dark.png", optimize=True)


if __name__ == "__main__":
    main()
