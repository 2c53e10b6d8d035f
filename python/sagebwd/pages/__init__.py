# SPDX-License-Identifier: Apache-2.0
"""Pieces of HTML pages, for all that this package writes."""
