#!/usr/bin/env bash
"$@"
