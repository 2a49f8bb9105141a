"""Checks of figures."""


def overlapping(artists, canvas):
    """Return the pairs of artists of a figure that overlap."""
    boxes = [artist.get_window_extent(canvas.get_renderer()) for artist in artists]
    return [(a, b) for k, a in enumerate(boxes) for b in boxes[:k] if a.overlaps(b)]
