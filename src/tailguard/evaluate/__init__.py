"""What a policy did on bars it was given: backtests, metrics and the baselines to beat."""
