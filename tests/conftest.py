"""Tests keep their data in a directory of their own, made before Django reads its settings."""

from __future__ import annotations

import os
import tempfile

os.environ["LLMGW_DATA_DIR"] = tempfile.mkdtemp(prefix="llmgw-test-")
