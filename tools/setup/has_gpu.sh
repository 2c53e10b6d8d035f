#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Succeeds where an NVIDIA GPU answers.
nvidia-smi -L 2> /dev/null | grep -q GPU
