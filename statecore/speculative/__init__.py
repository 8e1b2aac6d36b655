"""Drafts for speculative decoding."""

from statecore.speculative._ngram import NGramDraft as NGramDraft

__all__ = ["NGramDraft"]
