"""Python imports this first where the folder is on its path: every process of a world then has the torchvision of
`make torchvision`."""

from __future__ import annotations

from tests.compat import torchvision_site as torchvision_site
