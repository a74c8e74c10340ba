"""From file bytes to pixels. Reading headers is cheap and imports no torch; decoding belongs to a replica."""
