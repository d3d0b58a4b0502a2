// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Errors of a table.

/// Error of the transport: a memory node died, or its memory is no longer registered.
#[derive(Debug, thiserror::Error)]
#[error("the memory of the table cannot be reached: {reason}")]
pub(crate) struct TransportError {
    /// Error of kite, libibverbs or TCP.
    pub(crate) reason: String,
}

impl TransportError {
    pub(crate) fn new(reason: impl std::fmt::Display) -> Self {
        Self {
            reason: reason.to_string(),
        }
    }
}

/// Error of an operation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The key is in the table already.
    #[error("the key exists")]
    Exists,
    /// The key is not in the table.
    #[error("the key does not exist")]
    NotFound,
    /// Key and value exceed the maximum of a block.
    #[error("key and value exceed {} bytes", crate::block::PAYLOAD_MAX_BYTES)]
    TooLong,
    /// No memory for blocks or segments, or the directory has its maximum depth.
    #[error("the table is full: serve a table with more memory")]
    Full,
    /// The memory has content that no worker writes.
    #[error("the table is damaged: {0}; serve a new one")]
    Damaged(String),
    /// The memory cannot be reached. The operation may have been executed.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

pub(crate) type Result<T> = std::result::Result<T, Error>;
