"""What outlives calls: the blocks of one model, its pins, and the memory they may take."""
