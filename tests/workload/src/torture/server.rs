// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Server of a region that counts the executions of each numbered call.

use std::collections::{HashMap, HashSet};

use anyhow::{ensure, Result};
use kite::{IncomingRpc, Region, ServeOptions, Service, RPC_INLINE_BYTES};

use super::unless_fault;

/// Function that executes the call with the number in its data, and replies with the number.
pub(super) const EXECUTE: u32 = 0;

/// Function that replies with the number of calls of the caller's node that were executed.
pub(super) const REPORT: u32 = 1;

/// Registers the service of a region.
pub(super) fn start(region: &Region) -> Result<Service> {
    Ok(region.serve(&ServeOptions::new())?)
}

/// Serves calls. No call may be executed twice.
pub(super) fn serve(service: &Service) -> Result<()> {
    let mut executed: HashMap<u32, HashSet<u64>> = HashMap::new();
    let mut buffer = [0; RPC_INLINE_BYTES];
    loop {
        let incoming = service.receive(&mut buffer)?;
        let calls = executed.entry(incoming.node).or_default();
        let value = match incoming.function {
            REPORT => calls.len() as u64,
            _ => execute(calls, &incoming)?,
        };
        if let Some(call) = incoming.call {
            unless_fault(call.reply(&value.to_ne_bytes()))?;
        }
    }
}

/// Adds the number of a call to those that were executed.
fn execute(calls: &mut HashSet<u64>, incoming: &IncomingRpc<'_>) -> Result<u64> {
    let number = u64::from_ne_bytes(incoming.data.try_into()?);
    let node = incoming.node;
    ensure!(
        calls.insert(number),
        "call {number} of node {node} was executed twice"
    );
    Ok(number)
}
