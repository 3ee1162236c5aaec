"""Graphics cards that need not be at hand: what data sheets and published benchmarks say of them.

cards.toml     the cards, each with its sources
table.py       reads a card of it, or one of your own in JSON, and describes it as a device
"""

from stowage.stages.device.cards.table import Card, card_named, card_names, read_card

__all__ = ["Card", "card_named", "card_names", "read_card"]
