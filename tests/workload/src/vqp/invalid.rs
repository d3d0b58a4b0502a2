// SPDX-License-Identifier: GPL-2.0 OR MIT
//! `vqp invalid`: invalid requests of each kind fail with the errno of the ABI, and do not affect valid requests.

use anyhow::{ensure, Context, Result};
use kite::{Buffer, Cluster, Error, IoQueue, RemoteMemory, Rights, SendWr, Vqp, WrOp};

use super::{RemoteTarget, LEN, TIMEOUT};

impl RemoteTarget {
    /// Pushes invalid requests. None of them is executed, and later requests complete.
    pub(super) fn check_invalid(&self, by_queue: bool) -> Result<()> {
        let cluster = Cluster::open()?;
        let local = cluster.reg_mr(Buffer::new(4096)?, Rights::empty())?;
        let other = Cluster::open()?;
        let foreign = other.reg_mr(Buffer::new(4096)?, Rights::READ)?;
        let vqp = cluster.connect(self.node)?;
        let good = self.send_wr(WrOp::Read, &local);
        let wrong_key = RemoteMemory {
            rkey: self.key ^ (1 << 20),
            ..self.remote()
        };
        let adds = WrOp::FetchAdd { operand: 1 };
        let cases = [
            (
                "longer than the local memory",
                SendWr { len: 4097, ..good },
                Error::OutOfRange,
            ),
            (
                "beyond the local memory",
                SendWr {
                    local_offset: 4089,
                    ..good
                },
                Error::OutOfRange,
            ),
            (
                "beyond the remote memory",
                SendWr {
                    remote_offset: LEN as u64 - 7,
                    ..good
                },
                Error::OutOfRange,
            ),
            (
                "offset 2^64 - 1",
                SendWr {
                    remote_offset: u64::MAX,
                    ..good
                },
                Error::OutOfRange,
            ),
            ("no bytes", SendWr { len: 0, ..good }, Error::Invalid),
            (
                "unknown key",
                SendWr {
                    remote: wrong_key,
                    ..good
                },
                Error::NotFound,
            ),
            (
                "memory of another session",
                SendWr {
                    local: &foreign,
                    ..good
                },
                Error::BadHandle,
            ),
            (
                "atomic of 4 bytes",
                SendWr {
                    op: adds,
                    len: 4,
                    ..good
                },
                Error::Invalid,
            ),
            (
                "unaligned atomic",
                SendWr {
                    op: adds,
                    remote_offset: 4,
                    ..good
                },
                Error::Invalid,
            ),
        ];
        let message = SendWr {
            op: WrOp::Send,
            remote: RemoteMemory::default(),
            ..good
        };
        let cases = cases.into_iter().chain([
            ("message to no port", message, Error::Invalid),
            (
                "message with remote memory",
                SendWr {
                    remote: self.remote(),
                    ..message
                },
                Error::Invalid,
            ),
            (
                "read with immediate data",
                SendWr {
                    immediate: Some(1),
                    ..good
                },
                Error::Invalid,
            ),
        ]);
        let mut queue = cluster.create_queue(4, 1)?;
        for (what, bad, error) in cases {
            if by_queue {
                check_between_valid(&mut queue, &vqp, good, bad, error).context(what)?;
                continue;
            }
            ensure!(
                vqp.push(&[good, bad]) == Err(error),
                "{what}: error is not {error:?}"
            );
            ensure!(
                vqp.pop(1, None) == Err(Error::WouldBlock),
                "{what}: unexpected completion"
            );
        }
        if by_queue {
            return Ok(());
        }
        ensure!(vqp.push(&[]) == Err(Error::Invalid), "empty push");
        let many = vec![good; kite::PUSH_BATCH_MAX + 1];
        ensure!(
            vqp.push(&many) == Err(Error::Invalid),
            "push of too many requests"
        );
        for _ in 0..kite::VQP_DEPTH / kite::PUSH_BATCH_MAX {
            vqp.push(&many[1..])?;
        }
        ensure!(
            vqp.push(&[good]) == Err(Error::QueueFull),
            "push to a full VQP"
        );
        let mut left = kite::VQP_DEPTH;
        while left != 0 {
            let done = vqp.pop(left, TIMEOUT)?;
            ensure!(done.iter().all(|done| done.result.is_ok()), "{done:?}");
            left -= done.len();
        }
        ensure!(
            vqp.receive(&local, 0, 8, None) == Err(Error::Invalid),
            "receive without a port"
        );
        self.check_invalid_listens(&cluster)?;
        ensure!(
            cluster
                .connect(77)
                .is_err_and(|error| error == Error::HostDown),
            "connect to an unknown node"
        );
        Ok(())
    }

    /// Checks that a port has one listener.
    fn check_invalid_listens(&self, cluster: &Cluster) -> Result<()> {
        const PORT: u32 = 4000;
        let try_listen = |port| cluster.listen(port).map(drop);
        ensure!(try_listen(0) == Err(Error::Invalid), "listen on port 0");
        let listener = cluster.listen(PORT)?;
        ensure!(
            try_listen(PORT) == Err(Error::PortInUse),
            "listen on a port in use"
        );
        let accepted = listener.accept(None).map(drop);
        ensure!(
            accepted == Err(Error::WouldBlock),
            "accept without a connection"
        );
        drop(listener);
        let listeners = (1..=kite::VQPS_MAX as u32 - 1).map(|port| cluster.listen(PORT + port));
        let _listeners = listeners.collect::<kite::Result<Vec<_>>>()?;
        ensure!(try_listen(PORT) == Err(Error::Busy), "too many listeners");
        Ok(())
    }
}

/// An I/O queue rejects an invalid request alone: the requests before and after it complete.
fn check_between_valid(
    queue: &mut IoQueue,
    vqp: &Vqp,
    good: SendWr<'_>,
    bad: SendWr<'_>,
    error: Error,
) -> Result<()> {
    for (tag, work) in [(0, good), (1, bad), (2, good)] {
        queue.push(vqp, &SendWr { tag, ..work })?;
    }
    for _ in 0..3 {
        let done = queue.wait()?;
        let expected = if done.tag == 1 { Err(error) } else { Ok(0) };
        ensure!(done.result == expected, "{done:?}, expected {expected:?}");
    }
    Ok(())
}
