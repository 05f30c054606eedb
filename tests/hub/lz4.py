"""LZ4 frames, read: the compression inside of what `hf_xet` uploads.

https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md and `lz4_Block_format.md` beside it. Checksums are not read.
"""

MAGIC = b"\x04\x22\x4d\x18"


def decompress(frame: bytes) -> bytes:
    """The content of a frame.

    Raises:
        ValueError: if it is none.
    """
    if frame[:4] != MAGIC:
        raise ValueError("not an LZ4 frame")
    flags = frame[4]
    block_checksums, content_size, dictionary = flags >> 4 & 1, flags >> 3 & 1, flags & 1
    position = 4 + 2 + 8 * content_size + 4 * dictionary + 1  # magic, descriptor with its checksum
    out = bytearray()
    while size := int.from_bytes(frame[position : position + 4], "little"):
        position += 4
        stored, size = size >> 31, size & 0x7FFFFFFF
        block = frame[position : position + size]
        if len(block) != size:
            raise ValueError("an LZ4 frame ends too early")
        if stored:
            out += block
        else:
            decompress_block(block, out)
        position += size + 4 * block_checksums
    return bytes(out)


def decompress_block(block: bytes, out: bytearray) -> None:
    """Appends the content of a block to `out`, to whose end its matches may refer."""
    position = 0

    def length(start: int) -> int:
        """A length that goes on in further bytes as long as they are 255."""
        nonlocal position
        if start == 15:
            while True:
                more = block[position]
                position += 1
                start += more
                if more != 255:
                    break
        return start

    while position < len(block):
        token = block[position]
        position += 1
        literals = length(token >> 4)
        out += block[position : position + literals]
        position += literals
        if position >= len(block):  # the last sequence has no match
            break
        offset = int.from_bytes(block[position : position + 2], "little")
        position += 2
        match = length(token & 15) + 4
        if not 0 < offset <= len(out):
            raise ValueError("an LZ4 match before the start")
        start = len(out) - offset
        while match > 0:  # a match may overlap with what it writes
            piece = out[start : start + match]  # all there is of it
            out += piece
            match -= len(piece)
