"""What bench/compare, bench/scaling and bench/peers/run have in common. Python's standard library only."""
