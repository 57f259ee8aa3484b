"""What to expect before hardware is bought: times, memory and prices from sizes alone, and fleets in numbers."""
