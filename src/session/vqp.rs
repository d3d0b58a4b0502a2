// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs of a session, and the memory that it has registered for them.

use super::{caller, Session};
use crate::{
    bindings, errno,
    fabric::{memory::Memory, Fabric},
    sys::{
        deadline::{settle, Deadline},
        pin::{Hold, Pinned},
    },
    vqp::{check::Asked, Completion, Driver, Vqp},
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::rights::Rights;

/// A queue pair that the poller drives.
struct Connected {
    number: u64,
    vqp: Arc<Vqp>,
    /// By which the poller knows it.
    driven: u64,
}

/// What a session has of both.
#[derive(Default)]
pub(super) struct Vqps {
    all: KVec<Connected>,
    /// Keys to its memory.
    keys: KVec<u32>,
}

impl Session {
    /// Registers memory of the current process. Returns its key.
    ///
    /// # Errors
    ///
    /// As `struct kite_memory` in `include/uapi/kite.h` says.
    pub(super) fn register_memory(&self, addr: u64, len: u64, others: Rights) -> Result<u32> {
        let rpc = self.rpc()?;
        rpc.lmr.cluster.node()?;
        let dynamic = rpc.lmr.cluster.fabric.dynamic()?;
        if len == 0 || len > bindings::KITE_MEMORY_MAX.into() || others.contains(Rights::MASTER) {
            return Err(EINVAL);
        }
        let base = usize::try_from(addr).map_err(|_| EFAULT)?;
        let pinned = Pinned::user(base, len as usize, true, Hold::Long)?;
        let pinned = Arc::new(pinned, GFP_KERNEL_ACCOUNT)?;
        self.vqps.lock().keys.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let memories = &dynamic.memories;
        let key = memories.register(pinned, (addr, len), caller::uid(), others)?;
        let kept = self.vqps.lock().keys.push(key, GFP_KERNEL_ACCOUNT);
        kept.inspect_err(|_| memories.forget(key))?;
        Ok(key)
    }

    /// Takes memory back.
    ///
    /// # Errors
    ///
    /// `EBADF` if it is not this session's.
    pub(super) fn forget_memory(&self, key: u32) -> Result {
        let rpc = self.rpc()?;
        let mut vqps = self.vqps.lock();
        let at = vqps.keys.iter().position(|other| *other == key);
        vqps.keys.remove(at.ok_or(EBADF)?).map_err(|_| EBADF)?;
        rpc.lmr.cluster.fabric.dynamic()?.memories.forget(key);
        Ok(())
    }

    /// Makes a queue pair to a node. Returns its number.
    ///
    /// # Errors
    ///
    /// As `struct kite_connect` in `include/uapi/kite.h` says.
    pub(super) fn connect(&self, node: u32, deadline: Deadline) -> Result<u64> {
        let rpc = self.rpc()?;
        let cluster = &rpc.lmr.cluster;
        let vqp = Vqp::connect(cluster, node, self.watch.clone(), deadline)?;
        let driver = Arc::new(Driver(vqp.clone()), GFP_KERNEL_ACCOUNT)?;
        let mut vqps = self.vqps.lock();
        if vqps.all.len() >= bindings::KITE_VQPS_MAX as usize {
            return Err(EBUSY);
        }
        vqps.all.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let driven = cluster.fabric.drive(driver)?;
        let number = self.next_number();
        let connected = Connected {
            number,
            vqp,
            driven,
        };
        vqps.all.push(connected, GFP_KERNEL_ACCOUNT)?;
        Ok(number)
    }

    /// Ends a queue pair.
    ///
    /// # Errors
    ///
    /// `EBADF` if there is no such.
    pub(super) fn disconnect(&self, number: u64) -> Result {
        let rpc = self.rpc()?;
        let mut vqps = self.vqps.lock();
        let at = vqps.all.iter().position(|one| one.number == number);
        let connected = vqps.all.remove(at.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(vqps);
        connected.end(&rpc.lmr.cluster.fabric);
        Ok(())
    }

    fn vqp(&self, number: u64) -> Result<Arc<Vqp>> {
        let vqps = self.vqps.lock();
        let found = vqps.all.iter().find(|one| one.number == number);
        found.map(|one| one.vqp.clone()).ok_or(EBADF)
    }

    /// Adds requests to a queue pair.
    ///
    /// # Errors
    ///
    /// As `struct kite_push` in `include/uapi/kite.h` says.
    pub(super) fn push(
        &self,
        number: u64,
        works: KVec<bindings::kite_work>,
        deadline: Deadline,
    ) -> Result {
        let rpc = self.rpc()?;
        let vqp = self.vqp(number)?;
        let cluster = &rpc.lmr.cluster;
        let memories = &cluster.fabric.dynamic()?.memories;
        let mut asked = KVec::with_capacity(works.len(), GFP_KERNEL_ACCOUNT)?;
        for work in works {
            let local = |key| self.own_memory(key, || memories.get(key));
            asked.push(Asked::new(work, local)?, GFP_KERNEL_ACCOUNT)?;
        }
        vqp.push(cluster, &asked, caller::uid(), deadline)
    }

    /// What `get` finds, if that is memory of this session.
    fn own_memory(
        &self,
        key: u32,
        get: impl FnOnce() -> Result<Arc<Memory>>,
    ) -> Result<Arc<Memory>> {
        let own = self.vqps.lock().keys.contains(&key);
        own.then(get).ok_or(EBADF)?
    }

    /// Takes completions of a queue pair.
    ///
    /// # Errors
    ///
    /// As `struct kite_pop` in `include/uapi/kite.h` says.
    pub(super) fn pop(
        &self,
        number: u64,
        most: u32,
        deadline: Option<Deadline>,
    ) -> Result<KVec<Completion>> {
        let vqp = self.vqp(number)?;
        // The RNIC may go while somebody waits.
        let pop = || vqp.pop(&self.rpc()?.lmr.cluster.fabric, most as usize);
        let Some(deadline) = deadline else {
            return pop();
        };
        let mut popped = Err(EAGAIN);
        let _impatient = vqp.patience().poll(|| {
            popped = pop();
            !matches!(&popped, Err(error) if *error == EAGAIN)
        });
        match popped {
            Err(error) if error == EAGAIN => settle(deadline, pop),
            popped => popped,
        }
    }

    /// Whether a queue pair has completions.
    pub(super) fn has_popped(&self) -> bool {
        let vqps = self.vqps.lock();
        vqps.all.iter().any(|one| one.vqp.has_completions())
    }

    /// Ends all queue pairs, and takes all memory back. If the RNIC is gone they are, too.
    pub(super) fn end_vqps(&self) {
        let vqps = core::mem::take(&mut *self.vqps.lock());
        let Ok(rpc) = self.rpc() else { return };
        let fabric = &rpc.lmr.cluster.fabric;
        for connected in vqps.all {
            connected.end(fabric);
        }
        if let Ok(dynamic) = fabric.dynamic() {
            vqps.keys
                .iter()
                .for_each(|key| dynamic.memories.forget(*key));
        }
    }
}

impl Connected {
    fn end(self, fabric: &Fabric) {
        fabric.drive_no_more(self.driven);
        self.vqp.close(errno::canceled());
    }
}
