// SPDX-License-Identifier: GPL-2.0 OR MIT
//! What can go wrong with a table.

/// Why the memory of the table cannot be reached: its node died, or it is not there any more.
#[derive(Debug, thiserror::Error)]
#[error("the memory of the table cannot be reached: {why}")]
pub(crate) struct Lost {
    /// Error of the transport.
    pub(crate) why: String,
}

impl Lost {
    pub(crate) fn because(why: impl std::fmt::Display) -> Self {
        Self {
            why: why.to_string(),
        }
    }
}

/// Why an operation was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// It is in the table already.
    #[error("the key exists")]
    Exists,
    /// It is not in the table.
    #[error("there is no such key")]
    NotFound,
    /// A key and its value are longer than any block.
    #[error("a key and its value have more than {} bytes", crate::block::PAIR_MAX)]
    TooLong,
    /// There is no memory left for blocks or segments.
    #[error("the memory of the table is full: serve one with more")]
    Full,
    /// Something is in the memory that no worker puts there.
    #[error("the table is damaged: {0}; serve a new one")]
    Damaged(String),
    /// The operation may have been done or not.
    #[error(transparent)]
    Lost(#[from] Lost),
}

pub(crate) type Result<T> = std::result::Result<T, Error>;
