// SPDX-License-Identifier: GPL-2.0

//! Virtual queue pairs (VQPs) of a session, and its listeners.
//!
//! # Operation
//!
//! [`Session::connect`] and [`Session::accept`] create a VQP and register a poll client, so the poller thread
//! drives the VQP. [`Session::push`] submits requests, [`Session::pop`] takes completions, and
//! [`Session::pop_message_into`] takes messages. Requests name local memory by the key of an MR, which must
//! belong to the session ([`mr`]).
//!
//! # Locking
//!
//! The mutex `Session::vqps` protects [`SessionVqps`]. It is taken before the locks of the VQP table, the VQP
//! registry, the MR table, the poll clients and VQPs. The poller thread runs clients with the poll
//! client table locked, and so only tries to lock `vqps`. No guard of the RNIC's services is held while a
//! thread waits for an event, because RNIC removal waits for all guards.

mod mr;

use super::{source, Session};
use crate::{
    bindings,
    errno::{TryError, TryResult},
    sys::deadline::Deadline,
    vqp::{
        listener::{AcceptedVqp, Listener},
        recv::pop::{MessagePop, ReceivedMsg, RecvBuffer},
        send::request::VqpRequest,
        table::VqpTable,
        Vqp, VqpCompletion, VqpEvent, VqpPollClient,
    },
};
use kernel::{alloc::flags::GFP_KERNEL_ACCOUNT, prelude::*, sync::Arc};
use kite_core::rights::Rights;

/// Timeout in milliseconds for fetching the bytes of a message, if the caller does not wait for messages.
const FETCH_TIMEOUT_MS: u32 = 5000;

/// VQP driven by the poller thread.
struct SessionVqp {
    id: u64,
    vqp: Arc<Vqp>,
    /// Number of the VQP's poll client.
    poll_client_id: u64,
}

/// Listener at a port.
struct SessionListener {
    id: u64,
    listener: Arc<Listener>,
}

/// VQPs, listeners, and MRs of a session.
#[derive(Default)]
pub(in crate::session) struct SessionVqps {
    vqps: KVec<SessionVqp>,
    listeners: KVec<SessionListener>,
    /// Keys of the MRs.
    mr_keys: KVec<u32>,
}

impl Session {
    /// Creates a VQP to a node, and to a port of the node unless the port is 0. `owners` are the user of the VQP
    /// and the required user of the listener. Returns the number of the VQP.
    ///
    /// # Errors
    ///
    /// See `struct kite_connect` in `include/uapi/kite.h`.
    pub(in crate::session) fn connect(
        &self,
        peer: (u32, u32),
        owners: (u32, Option<u32>),
        deadline: Deadline,
    ) -> Result<u64> {
        let vqp_table = self.enter_vqp_table()?;
        let vqp = Vqp::connect(&vqp_table, peer, owners, self.events.clone(), deadline)?;
        self.insert_vqp(&vqp_table, vqp)
    }

    /// Adds a VQP to the session, and lets the poller thread drive the VQP. Closes the VQP on failure.
    /// Returns the number of the VQP.
    fn insert_vqp(&self, vqp_table: &Arc<VqpTable>, vqp: Arc<Vqp>) -> Result<u64> {
        self.do_insert_vqp(vqp_table, vqp.clone())
            .inspect_err(|_| vqp_table.close(&vqp))
    }

    fn do_insert_vqp(&self, vqp_table: &Arc<VqpTable>, vqp: Arc<Vqp>) -> Result<u64> {
        let poll_client = VqpPollClient {
            vqp: vqp.clone(),
            table: vqp_table.clone(),
        };
        let driver = Arc::new(poll_client, GFP_KERNEL_ACCOUNT)?;
        let mut vqps = self.vqps.lock();
        vqps.check_limit()?;
        vqps.vqps.reserve(1, GFP_KERNEL_ACCOUNT)?;
        vqp_table.register(vqp.clone())?;
        let poll_client_id = vqp_table.fabric().poll_clients.register(driver)?;
        let vqp_id = self.alloc_id();
        let entry = SessionVqp {
            id: vqp_id,
            vqp,
            poll_client_id,
        };
        vqps.vqps.push(entry, GFP_KERNEL_ACCOUNT)?;
        Ok(vqp_id)
    }

    /// Listens at a port for a user. Returns the number of the listener.
    ///
    /// # Errors
    ///
    /// See `struct kite_listen` in `include/uapi/kite.h`.
    pub(in crate::session) fn listen(&self, port: u32, uid: u32) -> Result<u64> {
        let vqp_table = self.enter_vqp_table()?;
        vqp_table.memory_service.cluster.local_node()?;
        if port == 0 {
            return Err(EINVAL);
        }
        let mut vqps = self.vqps.lock();
        vqps.check_limit()?;
        vqps.listeners.reserve(1, GFP_KERNEL_ACCOUNT)?;
        let events = self.events.clone();
        let listener = vqp_table.listen(port, uid, events)?;
        let listener_id = self.alloc_id();
        let entry = SessionListener {
            id: listener_id,
            listener,
        };
        vqps.listeners.push(entry, GFP_KERNEL_ACCOUNT)?;
        Ok(listener_id)
    }

    /// Accepts a VQP that a peer connected to the port of a listener. Returns the number of the VQP, the peer
    /// node, and the UID of the peer.
    ///
    /// # Errors
    ///
    /// See `struct kite_accept` in `include/uapi/kite.h`.
    pub(in crate::session) fn accept(
        &self,
        listener_id: u64,
        deadline: Option<Deadline>,
    ) -> Result<(u64, u32, u32)> {
        let listener = {
            let vqps = self.vqps.lock();
            vqps.check_limit()?;
            let mut entries = vqps.listeners.iter();
            let found = entries.find(|entry| entry.id == listener_id).ok_or(EBADF)?;
            found.listener.clone()
        };
        // Enter the services per attempt: a guard held while waiting would block RNIC removal.
        let try_accept = || {
            let vqp_table = self.enter_vqp_table()?;
            vqp_table.accept(&listener)
        };
        let accepted = match deadline {
            Some(deadline) => listener.wait(deadline, try_accept),
            None => try_accept().map_err(Error::from),
        };
        let AcceptedVqp { vqp, peer_uid: uid } = accepted?;
        let node = vqp.peer.node;
        Ok((self.insert_vqp(&*self.enter_vqp_table()?, vqp)?, node, uid))
    }

    /// Closes a VQP.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the session has no VQP of this number.
    /// - `ENODEV`: the RNIC was removed.
    pub(in crate::session) fn close_vqp(&self, vqp_id: u64) -> Result {
        let vqp_table = self.enter_vqp_table()?;
        let mut vqps = self.vqps.lock();
        let index = vqps.vqps.iter().position(|entry| entry.id == vqp_id);
        let removed = vqps.vqps.remove(index.ok_or(EBADF)?).map_err(|_| EBADF)?;
        drop(vqps);
        removed.close(&vqp_table);
        Ok(())
    }

    /// Closes a listener.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the session has no listener of this number.
    /// - `ENODEV`: the RNIC was removed.
    pub(in crate::session) fn close_listener(&self, listener_id: u64) -> Result {
        let vqp_table = self.enter_vqp_table()?;
        let mut vqps = self.vqps.lock();
        let mut entries = vqps.listeners.iter();
        let index = entries.position(|entry| entry.id == listener_id);
        let removed = vqps.listeners.remove(index.ok_or(EBADF)?);
        let removed = removed.map_err(|_| EBADF)?;
        drop(vqps);
        vqp_table.unlisten(&removed.listener);
        Ok(())
    }

    /// Returns a VQP.
    ///
    /// # Errors
    ///
    /// - `EBADF`: the session has no VQP of this number.
    pub(in crate::session) fn vqp(&self, vqp_id: u64) -> Result<Arc<Vqp>> {
        self.vqps.lock().find(vqp_id)
    }

    /// Like [`Self::vqp`], for the poller thread: fails with [`TryError::WouldBlock`] instead of waiting for
    /// a holder of the lock. The holder may wait for the poller thread.
    pub(in crate::session) fn try_vqp(&self, vqp_id: u64) -> TryResult<Arc<Vqp>> {
        let vqps = self.vqps.try_lock().ok_or(TryError::WouldBlock)?;
        Ok(vqps.find(vqp_id)?)
    }

    /// Builds a request of a user from a work request that names an MR of this session.
    ///
    /// # Errors
    ///
    /// - [`TryError::WouldBlock`]: `vqps` is locked.
    /// - `EBADF`: the MR does not belong to this session.
    /// - Otherwise see [`VqpRequest::new`].
    pub(in crate::session) fn try_build_request(
        &self,
        vqp_table: &VqpTable,
        wr: &bindings::kite_send_wr,
        uid: u32,
    ) -> TryResult<VqpRequest> {
        let is_own = self
            .vqps
            .try_lock()
            .ok_or(TryError::WouldBlock)?
            .mr_keys
            .contains(&wr.key);
        let mr_table = &vqp_table.fabric().mr_table;
        let resolve_mr = |key| is_own.then(|| mr_table.get(key)).ok_or(EBADF)?;
        Ok(VqpRequest::new(wr, uid, resolve_mr)?)
    }

    /// Submits `count` requests of a user to a VQP. `read_wr` returns the work request of an index.
    ///
    /// # Errors
    ///
    /// See `struct kite_push` in `include/uapi/kite.h`.
    pub(in crate::session) fn push(
        &self,
        vqp_id: u64,
        count: usize,
        read_wr: impl Fn(usize) -> Result<bindings::kite_send_wr>,
        uid: u32,
        deadline: Deadline,
    ) -> Result {
        let vqp_table = self.enter_vqp_table()?;
        let vqp = self.vqp(vqp_id)?;
        let cluster = &vqp_table.memory_service.cluster;
        let mr_table = &cluster.fabric.mr_table;
        let mut requests = KVec::with_capacity(count, GFP_KERNEL_ACCOUNT)?;
        for i in 0..count {
            let resolve_mr = |key| self.own_mr(key, || mr_table.get(key));
            let request = VqpRequest::new(&read_wr(i)?, uid, resolve_mr)?;
            requests.push(request, GFP_KERNEL_ACCOUNT)?;
        }
        let pushed = vqp.push(cluster, requests, self.tenant()?, deadline);
        pushed.map_err(|error| self.or_device_gone(error))
    }

    /// Takes up to `max_count` completions of a VQP. Without a deadline does not wait.
    ///
    /// # Errors
    ///
    /// See `struct kite_pop` in `include/uapi/kite.h`.
    pub(in crate::session) fn pop(
        &self,
        vqp_id: u64,
        max_count: u32,
        deadline: Option<Deadline>,
    ) -> Result<KVec<VqpCompletion>> {
        let vqp = self.vqp(vqp_id)?;
        // Enter the services per attempt: a guard held while waiting would block RNIC removal.
        let try_pop = || vqp.pop(self.enter_vqp_table()?.fabric(), max_count as usize);
        let mut popped = match deadline {
            Some(deadline) => vqp.wait(VqpEvent::Completion, deadline, try_pop)?,
            None => vqp.try_or_poll(self.enter_vqp_table()?, VqpEvent::Completion, try_pop)?,
        };
        for (_, result) in popped.iter_mut() {
            *result = result.map_err(|error| self.or_device_gone(error));
        }
        Ok(popped)
    }

    /// Takes the first message of a VQP, into an MR of this session. Without a deadline does not wait for a
    /// message.
    ///
    /// # Errors
    ///
    /// See `struct kite_pop_message` in `include/uapi/kite.h`.
    fn pop_message(
        &self,
        vqp_id: u64,
        (key, addr, len): (u32, u64, u32),
        deadline: Option<Deadline>,
    ) -> Result<ReceivedMsg> {
        let vqp = self.vqp(vqp_id)?;
        let fetch_deadline =
            deadline.unwrap_or_else(|| Deadline::after_ms(FETCH_TIMEOUT_MS).interruptible());
        let try_pop = || {
            let vqp_table = self.enter_vqp_table()?;
            let mr_table = &vqp_table.fabric().mr_table;
            // The reference to the MR must not outlive `vqp_table`, whose guard blocks RNIC removal.
            let mr = self.own_mr(key, || mr_table.get(key))?;
            let record = &mr.entry;
            record
                .check_access(record.owner_uid, Rights::ALL, addr, len.into())
                .map_err(|_| ERANGE)?;
            let buffer = RecvBuffer { mr, addr, len };
            let pop = MessagePop {
                vqp: &vqp,
                table: &vqp_table,
                buffer: &buffer,
                deadline: fetch_deadline,
            };
            let popped = pop.execute();
            drop(buffer);
            popped
        };
        match deadline {
            Some(deadline) => vqp.wait(VqpEvent::Message, deadline, try_pop),
            None => vqp.try_or_poll(self.enter_vqp_table()?, VqpEvent::Message, try_pop),
        }
    }

    /// Takes the first message into the MR that `args` names, and stores the description of the message in
    /// `args`.
    ///
    /// # Errors
    ///
    /// See `struct kite_pop_message` in `include/uapi/kite.h`.
    pub(in crate::session) fn pop_message_into(
        &self,
        args: &mut bindings::kite_pop_message,
        deadline: Option<Deadline>,
    ) -> Result {
        let buffer = (args.key, args.addr, args.len);
        let received = self.pop_message(args.vqp, buffer, deadline)?;
        let flag = |set: bool, flag| if set { flag } else { 0 };
        args.len = received.len;
        args.immediate = received.immediate.unwrap_or(0);
        args.flags = flag(
            received.immediate.is_some(),
            bindings::KITE_RECV_FLAG_WITH_IMM,
        ) | flag(received.is_written, bindings::KITE_RECV_FLAG_PLACED);
        Ok(())
    }

    /// Returns `true` if a VQP has completions or messages, if a listener has a VQP to accept, or if the RNIC
    /// was removed.
    pub(in crate::session) fn has_vqp_events(&self) -> bool {
        let vqps = self.vqps.lock();
        let vqp_table = match self.enter_vqp_table() {
            Ok(exchange) => exchange,
            Err(error) => return error == ENODEV,
        };
        let mut listeners = vqps.listeners.iter();
        vqps.vqps.iter().any(|entry| entry.vqp.is_ready())
            || listeners.any(|entry| vqp_table.has_pending_accept(&entry.listener))
    }

    /// Returns the statistics of all VQPs of the caller, or of all users if the caller is root.
    ///
    /// # Errors
    ///
    /// - `ENODEV`: the RNIC was removed.
    /// - `ENOMEM`: out of memory.
    /// - `ENOTCONN`: the session is not bound.
    pub(in crate::session) fn list_vqps(&self) -> Result<KVec<bindings::kite_vqp_info>> {
        let uid = source::current_uid();
        let owner_uid = (uid != source::ROOT_UID).then_some(uid);
        self.enter_vqp_table()?.list_vqps(owner_uid)
    }

    /// Closes all VQPs and listeners, and deregisters all MRs. RNIC removal has already done so if the RNIC
    /// was removed.
    pub(in crate::session) fn close_vqps(&self) {
        let vqps = core::mem::take(&mut *self.vqps.lock());
        let Ok(vqp_table) = self.enter_vqp_table() else {
            return;
        };
        for entry in vqps.listeners {
            vqp_table.unlisten(&entry.listener);
        }
        for entry in vqps.vqps {
            entry.close(&vqp_table);
        }
        let mr_table = &vqp_table.fabric().mr_table;
        vqps.mr_keys
            .iter()
            .for_each(|key| mr_table.deregister(*key));
    }
}

impl SessionVqps {
    fn find(&self, vqp_id: u64) -> Result<Arc<Vqp>> {
        let found = self.vqps.iter().find(|entry| entry.id == vqp_id);
        found.map(|one| one.vqp.clone()).ok_or(EBADF)
    }

    fn check_limit(&self) -> Result {
        let is_full = self.vqps.len() + self.listeners.len() >= bindings::KITE_VQPS_MAX as usize;
        if is_full {
            Err(EBUSY)
        } else {
            Ok(())
        }
    }
}

impl SessionVqp {
    fn close(self, vqp_table: &Arc<VqpTable>) {
        vqp_table
            .fabric()
            .poll_clients
            .unregister(self.poll_client_id);
        vqp_table.close(&self.vqp);
    }
}
