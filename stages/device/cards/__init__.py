"""Knows graphics cards that need not be at hand, from data sheets and published benchmarks.

- `cards.toml`: the cards, each with its sources.
- `table`: reads a card from that file, or one that someone described in JSON, and describes it as a device.
"""

from stowage.stages.device.cards.table import Card, card_named, card_names, read_card

__all__ = ["Card", "card_named", "card_names", "read_card"]
