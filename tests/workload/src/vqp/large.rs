// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp large`: requests of all lengths up to the whole memory, with a check of each byte.

use anyhow::{ensure, Result};
use clap::Args;
use kite::{Buffer, Cluster, Mr, Rights, SendWr, Vqp, WrOp};

use super::{RemoteTarget, TIMEOUT};
use crate::support::random::Random;

/// Bytes that are compared at a time.
const CHUNK: usize = 1 << 20;

/// Writes and reads back with one request each, in ascending lengths
#[derive(Args, Clone, Debug)]
pub(crate) struct Large {
    #[command(flatten)]
    target: RemoteTarget,
    /// Maximum length in MiB
    #[arg(long, default_value_t = 1)]
    mib: usize,
}

impl Large {
    pub(crate) fn run(&self) -> Result<()> {
        let cluster = Cluster::open()?;
        let longest = self.mib << 20;
        let local = cluster.reg_mr(Buffer::new(longest)?, Rights::empty())?;
        let vqp = cluster.connect(self.target.node)?;
        // The odd offset lets requests cross page boundaries.
        for len in [1, 8, 255, 4096, 4097, 65_535, CHUNK - 1] {
            self.check_round(&vqp, &local, 1, len)?;
        }
        self.check_round(&vqp, &local, 0, longest)
    }

    /// Writes random bytes, and reads them back.
    fn check_round(&self, vqp: &Vqp, local: &Mr, at: usize, len: usize) -> Result<()> {
        let request = SendWr {
            local_offset: at,
            len,
            remote_offset: at as u64,
            ..self.target.send_wr(WrOp::Write, local)
        };
        let store = |wrong: u8| {
            for_each_chunk(at, len, |at, bytes| {
                bytes.iter_mut().for_each(|byte| *byte ^= wrong);
                Ok(local.buffer().store(at, bytes)?)
            })
        };
        store(0)?;
        complete(vqp, request)?;
        store(0xff)?;
        let op = WrOp::Read;
        complete(vqp, SendWr { op, ..request })?;
        for_each_chunk(at, len, |at, bytes| {
            let mut found = vec![0; bytes.len()];
            local.buffer().load(at, &mut found)?;
            ensure!(
                found == bytes,
                "CORRUPT: transfer of {len} bytes, after byte {at}"
            );
            Ok(())
        })
    }
}

/// Calls `f` with each chunk of a reproducible random sequence.
fn for_each_chunk(
    start: usize,
    len: usize,
    mut f: impl FnMut(usize, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let mut random = Random::new(len as u64, 0);
    let mut bytes = vec![0; CHUNK];
    for at in (0..len).step_by(CHUNK) {
        let here = &mut bytes[..CHUNK.min(len - at)];
        random.fill(here);
        f(start + at, here)?;
    }
    Ok(())
}

fn complete(vqp: &Vqp, request: SendWr<'_>) -> Result<()> {
    vqp.push(&[request])?;
    vqp.pop(1, TIMEOUT)?[0].result?;
    Ok(())
}
