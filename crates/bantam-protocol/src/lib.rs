//! Host-guest messages: pure encoding and decoding, no I/O
