"""Makes mpigossip/data/digits.h5, the data set that the package carries.

    python -m pip install scikit-learn
    python tools/data/make_digits.py

The images are those of scikit-learn's `load_digits`: 1,797 pictures of 8x8 pixels with values
0 to 16, the test part of the "Optical Recognition of Handwritten Digits" set at UCI (E. Alpaydin,
C. Kaynak, 1998; CC BY 4.0). Every fifth sample (numbers 0, 5, 10, …) is for testing.
"""

from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

from mpigossip.store.packing import FORMAT, publish

OUT = Path(__file__).parents[2] / "mpigossip" / "data" / "digits.h5"


def main() -> None:
    """Write the file beside its place, then rename it."""
    digits = load_digits()
    images = digits.images.astype(np.uint8)[:, None]
    labels = digits.target.astype(np.int64)
    test = np.arange(len(labels)) % 5 == 0
    pixels = images[~test] / 16
    temporary = OUT.with_suffix(".part")
    with h5py.File(temporary, "w", libver="earliest") as file:
        file.attrs.update(
            format=FORMAT,
            version=1,  # small and compared with its source: without checksums
            kind="arrays",
            channels=1,
            scale=16.0,
            mean=np.array([pixels.mean()]),
            std=np.array([pixels.std()]),
            source="UCI Machine Learning Repository, Optical Recognition of Handwritten Digits, "
            "E. Alpaydin and C. Kaynak, 1998, https://doi.org/10.24432/C50P49; "
            "its test part, as in scikit-learn's load_digits",
            licence="CC BY 4.0, https://creativecommons.org/licenses/by/4.0/",
        )
        file["classes"] = np.array([str(digit) for digit in range(10)], h5py.string_dtype())
        for name, chosen in (("train", ~test), ("test", test)):
            file[f"{name}/images"], file[f"{name}/labels"] = images[chosen], labels[chosen]
    publish(temporary, OUT)
    print(f"{OUT}: {int((~test).sum())} train, {int(test.sum())} test, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
