#!/bin/sh
# Keeps the newest weights of a mounted job, every minute (or every $3 seconds), until the job ends:
#
#   tensorwire mount JOB job --daemon
#   sh examples/checkpoint_every_minute.sh job kept
set -u
while step=$(cat "$1/control/clock" 2>/dev/null) && [ -n "$step" ]; do
    cp -L "$1/model.safetensors" "$2/.new" && mv "$2/.new" "$2/step-$step.safetensors"
    sleep "${3:-60}"
done
