//! Memory layouts, boot protocols and CPU policy per architecture
