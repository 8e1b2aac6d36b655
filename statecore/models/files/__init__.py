"""The files models come in: Hugging Face folders and GGUF, their tensors, configurations, tokenizers and chats."""

from statecore.models.files._checkpoint import Checkpoint as Checkpoint
from statecore.models.files._checkpoint import open_folder as open_folder
from statecore.models.files._checkpoint import open_gguf as open_gguf
from statecore.models.files._tensors import Tensors as Tensors
from statecore.models.files._tokenizer import TextTokenizer as TextTokenizer
from statecore.models.files._tokenizer import check_vocabulary as check_vocabulary

__all__ = ["Checkpoint", "Tensors", "TextTokenizer", "check_vocabulary", "open_folder", "open_gguf"]
