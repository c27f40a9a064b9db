"""A training run as ``wavetrain train`` does it: config, set-up, the loop, what it shows and what it leaves behind."""
