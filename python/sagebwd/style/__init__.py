# SPDX-License-Identifier: Apache-2.0
"""The style sheet of all pages."""
