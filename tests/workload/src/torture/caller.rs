// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Numbered calls, each of which is executed at most once, and exactly once if it has a reply.

use std::time::Duration;

use anyhow::{ensure, Result};
use kite::Region;

use super::server::{EXECUTE, REPORT};
use super::{unless_fault, until_healed, Worker};

/// Calls the server of the region again and again. One caller runs on each node.
pub(super) struct Caller {
    region: Region,
    /// Number of calls.
    called: u64,
    /// Number of calls with a reply.
    acked: u64,
}

impl Caller {
    pub(super) fn new(region: Region) -> Self {
        Caller {
            region,
            called: 0,
            acked: 0,
        }
    }

    /// Calls a function. Returns `None` if a fault prevents the reply.
    fn call(&self, function: u32, number: u64) -> Result<Option<u64>> {
        let mut reply = [0; 8];
        let called = self
            .region
            .call(function, &number.to_ne_bytes(), &mut reply);
        Ok(unless_fault(called)?.map(|_| u64::from_ne_bytes(reply)))
    }
}

impl Worker for Caller {
    /// Calls are short: at a cut, some are executed and not acknowledged.
    const PACE: Duration = Duration::from_millis(10);

    fn step(&mut self) -> Result<()> {
        self.called += 1;
        if let Some(reply) = self.call(EXECUTE, self.called)? {
            ensure!(
                reply == self.called,
                "reply {reply} to call {}",
                self.called
            );
            self.acked += 1;
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<u64> {
        let executed = until_healed(|| self.call(REPORT, 0))?;
        let possible = self.acked..=self.called;
        ensure!(
            possible.contains(&executed),
            "{executed} calls were executed, expected {possible:?}"
        );
        Ok(self.acked)
    }
}
