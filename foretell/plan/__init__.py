"""What to expect before hardware is bought: times, memory, lengths and prices from sizes alone, and fleets in numbers."""
