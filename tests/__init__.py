"""Tests. Compiled code is kept where workers keep it, so that a change of the sources never meets old code."""

import numba

from dpu import jitcache

if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(jitcache.directory()[0])
