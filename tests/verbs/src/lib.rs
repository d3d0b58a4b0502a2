// SPDX-License-Identifier: GPL-2.0 OR MIT
//! As much of libibverbs as a pair of connected queue pairs needs, for what kite is compared with.

mod memory;

use std::ffi::{c_int, CStr};
use std::io;
use std::marker::PhantomData;
use std::mem::zeroed;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyhow::{anyhow, bail, ensure, Context, Result};
use serde::{Deserialize, Serialize};

pub use memory::Memory;

#[allow(missing_docs, unreachable_pub, dead_code, unsafe_op_in_unsafe_fn)]
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod raw {
    include!(concat!(env!("OUT_DIR"), "/verbs.rs"));
}
use raw::*;

const PORT: u8 = 1;

/// Most requests under way.
pub const DEPTH: usize = 64;

/// Most requests posted by one call.
pub const CHAIN: usize = 32;

/// Reads under way, of those: what any RNIC can do.
const READS: u8 = 16;

/// More GIDs than a port of this machine has.
const GIDS: c_int = 32;

/// One side of a connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct End {
    gid: [u8; 16],
    lid: u16,
    qpn: u32,
    mtu: u32,
    /// The buffer.
    pub spot: Spot,
}

/// Memory of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spot {
    addr: u64,
    rkey: u32,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// To the other side.
    Write,
    /// From the other side.
    Read,
    /// Makes eight bytes of the other side `new` if they are `expected`; what they were comes back.
    CompareSwap {
        /// Comparand.
        expected: u64,
        /// New value.
        new: u64,
    },
    /// Adds to eight bytes of the other side; what they were comes back.
    FetchAdd {
        /// Addend.
        operand: u64,
    },
    /// To where the other side has posted that it receives; it has no [`Spot`].
    Send,
}

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Operation.
    pub verb: Verb,
    /// The first byte of the buffer.
    pub at: usize,
    /// Bytes; 8 of atomic operations.
    pub len: usize,
    /// Memory of the other side, if the verb has any.
    pub spot: Spot,
    /// Requests a completion on success. A failed request always has a completion.
    pub signalled: bool,
}

impl Spot {
    /// So many bytes behind.
    pub fn plus(self, offset: usize) -> Self {
        Spot {
            addr: self.addr + offset as u64,
            ..self
        }
    }
}

/// Memory that others may reach and that is not ours.
#[derive(Debug)]
pub struct Shared<'a> {
    mr: NonNull<ibv_mr>,
    _of: PhantomData<&'a Device>,
}

impl Shared<'_> {
    /// Returns address and key, to be sent to peers.
    pub fn spot(&self) -> Spot {
        // SAFETY: it is live.
        let mr = unsafe { self.mr.as_ref() };
        Spot {
            addr: mr.addr as u64,
            rkey: mr.rkey,
        }
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// Memory that the other side may reach besides the buffer of a pair.
#[derive(Debug)]
pub struct Lent<'a> {
    shared: Shared<'a>,
    // It goes last.
    _memory: Memory,
}

impl Lent<'_> {
    /// Returns address and key, to be sent to the peer.
    pub fn spot(&self) -> Spot {
        self.shared.spot()
    }
}

/// Rights of peers to memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read and write it.
    Plain,
    /// And do atomic operations there, which not every RNIC can.
    Atomic,
}

impl Access {
    /// As libibverbs has it, for memory and queue pairs.
    fn flags(self) -> u32 {
        let plain = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        match self {
            Self::Plain => plain,
            Self::Atomic => plain | IBV_ACCESS_REMOTE_ATOMIC,
        }
    }
}

/// A device in use, with what queue pairs are made of.
///
/// All pointers are live objects of libibverbs that this owns.
#[derive(Debug)]
pub struct Device {
    context: NonNull<ibv_context>,
    pd: NonNull<ibv_pd>,
    cq: NonNull<ibv_cq>,
    port: ibv_port_attr,
    gid_index: u8,
    gid: [u8; 16],
    access: Access,
}

// SAFETY: functions of libibverbs may be called by any thread, also on the same object.
unsafe impl Send for Device {}
// SAFETY: likewise.
unsafe impl Sync for Device {}

impl Device {
    /// Opens a device, the first if it has no name.
    ///
    /// # Errors
    /// If there is none, or its objects cannot be made.
    pub fn open(name: &str, access: Access) -> Result<Arc<Self>> {
        let context = open(name)?;
        let (gid_index, gid) = gid(context)?;
        let port = port(context)?;
        // What was made before a failure stays until the program ends, which it then does.
        // SAFETY: the device is open.
        let pd = unsafe { ibv_alloc_pd(context.as_ptr()) };
        let pd = made(pd, "a protection domain")?;
        let (entries, none) = (2 * DEPTH as c_int, ptr::null_mut());
        // SAFETY: as above; no channel is needed.
        let cq = unsafe { ibv_create_cq(context.as_ptr(), entries, none, ptr::null_mut(), 0) };
        Ok(Arc::new(Self {
            context,
            pd,
            cq: made(cq, "a completion queue")?,
            port,
            gid_index,
            gid,
            access,
        }))
    }

    /// Registers memory for peers that are connected to a QP of this device.
    ///
    /// # Safety
    /// The `len` bytes at `start` are valid for as long as the result lives, and nothing refers into them.
    ///
    /// # Errors
    /// If it cannot be pinned.
    pub unsafe fn share(&self, start: *mut u8, len: usize) -> Result<Shared<'_>> {
        // SAFETY: the caller vouches for the memory.
        let mr = unsafe { self.register(start, len) }?;
        Ok(Shared {
            mr,
            _of: PhantomData,
        })
    }

    /// Lets the other side of every queue pair of the domain reach memory.
    ///
    /// # Safety
    /// The memory is live for as long as the region.
    unsafe fn register(&self, start: *mut u8, len: usize) -> Result<NonNull<ibv_mr>> {
        let (pd, access) = (self.pd.as_ptr(), self.access.flags());
        // SAFETY: the domain is live; the caller vouches for the memory.
        let mr = unsafe { ibv_reg_mr(pd, start.cast(), len, access as c_int) };
        made(mr, "a memory region")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: we own them, and what uses another goes first. Failures leave them to the exit.
        unsafe {
            ibv_destroy_cq(self.cq.as_ptr());
            ibv_dealloc_pd(self.pd.as_ptr());
            ibv_close_device(self.context.as_ptr());
        }
    }
}

/// Memory that queue pairs of a device may reach.
///
/// The pointer is a live region that this owns.
#[derive(Debug)]
pub struct Buffer {
    mr: NonNull<ibv_mr>,
    memory: Memory,
    device: Arc<Device>,
}

// SAFETY: functions of libibverbs may be called by any thread, also on the same object.
unsafe impl Send for Buffer {}
// SAFETY: likewise.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Registers so many bytes.
    ///
    /// # Errors
    /// If they cannot be pinned.
    pub fn new(device: &Arc<Device>, size: usize) -> Result<Arc<Self>> {
        let memory = Memory::new(size)?;
        // SAFETY: the memory outlives its region.
        let mr = unsafe { device.register(memory.as_ptr(), memory.len()) }?;
        Ok(Arc::new(Self {
            mr,
            memory,
            device: device.clone(),
        }))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: we own it.
        unsafe { ibv_dereg_mr(self.mr.as_ptr()) };
    }
}

/// A queue pair that may reach one buffer.
///
/// The pointer is a live queue pair that this owns.
#[derive(Debug)]
pub struct Pair {
    qp: NonNull<ibv_qp>,
    end: End,
    buffer: Arc<Buffer>,
}

impl Pair {
    /// Opens a device without atomic operations, the first if it has no name, and makes the objects.
    ///
    /// # Errors
    /// As of [`Device::open`] and [`Self::on`].
    pub fn new(device: &str, size: usize) -> Result<Self> {
        Self::on(&Device::open(device, Access::Plain)?, size)
    }

    /// Makes one of a device, with a buffer of its own.
    ///
    /// # Errors
    /// If its objects cannot be made.
    pub fn on(device: &Arc<Device>, size: usize) -> Result<Self> {
        Self::over(&Buffer::new(device, size)?)
    }

    /// Makes one that may reach a buffer, which others may reach, too.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn over(buffer: &Arc<Buffer>) -> Result<Self> {
        let device = &buffer.device;
        // SAFETY: the domain and the completion queue are live.
        let qp = unsafe { ibv_create_qp(device.pd.as_ptr(), &mut qp_of(device.cq)) };
        let qp = made(qp, "a queue pair")?;
        let end = End {
            gid: device.gid,
            lid: device.port.lid,
            // SAFETY: it is live.
            qpn: unsafe { qp.as_ref() }.qp_num,
            mtu: device.port.active_mtu,
            spot: Spot {
                addr: buffer.memory.as_ptr() as u64,
                // SAFETY: it is live.
                rkey: unsafe { buffer.mr.as_ref() }.rkey,
            },
        };
        Ok(Self {
            qp,
            end,
            buffer: buffer.clone(),
        })
    }

    /// Lends more memory.
    ///
    /// # Errors
    /// If it cannot be pinned.
    pub fn lend(&self, len: usize) -> Result<Lent<'_>> {
        let memory = Memory::new(len)?;
        // SAFETY: the memory outlives its region, and is never borrowed.
        let shared = unsafe { self.buffer.device.share(memory.as_ptr(), memory.len()) }?;
        Ok(Lent {
            shared,
            _memory: memory,
        })
    }

    /// The buffer, which stays where it is for as long as the pair.
    pub fn memory(&self) -> &Memory {
        &self.buffer.memory
    }

    /// Returns the address that the peer needs to connect.
    pub fn end(&self) -> &End {
        &self.end
    }

    /// Makes the queue pair ready.
    ///
    /// # Errors
    /// If the other side cannot be reached.
    pub fn connect(&self, other: &End) -> Result<()> {
        self.modify(
            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
            ibv_qp_attr {
                qp_state: IBV_QPS_INIT,
                port_num: PORT,
                qp_access_flags: self.buffer.device.access.flags(),
                ..nothing()
            },
        )?;
        self.modify(
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
            ibv_qp_attr {
                qp_state: IBV_QPS_RTR,
                path_mtu: self.end.mtu.min(other.mtu),
                dest_qp_num: other.qpn,
                max_dest_rd_atomic: READS,
                min_rnr_timer: 12,
                ah_attr: self.way_to(other),
                ..nothing()
            },
        )?;
        self.modify(
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC,
            ibv_qp_attr {
                qp_state: IBV_QPS_RTS,
                timeout: 18,
                retry_cnt: 7,
                rnr_retry: 7,
                max_rd_atomic: READS,
                ..nothing()
            },
        )
    }

    fn way_to(&self, other: &End) -> ibv_ah_attr {
        ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: other.gid },
                sgid_index: self.buffer.device.gid_index,
                hop_limit: 64,
                ..Default::default()
            },
            dlid: other.lid,
            is_global: 1,
            port_num: PORT,
            ..nothing_at_all()
        }
    }

    fn modify(&self, mask: u32, mut attr: ibv_qp_attr) -> Result<()> {
        // SAFETY: the queue pair is live, and the attributes of the mask are set.
        let code = unsafe { ibv_modify_qp(self.qp.as_ptr(), &mut attr, mask as c_int) };
        done(code).with_context(|| format!("setting attributes {mask:#x} of a queue pair"))
    }

    /// Moves the first `len` bytes of the buffer once, and waits for the completion as impatient programs
    /// do.
    ///
    /// # Errors
    /// As of [`Self::post`] and [`Self::poll`].
    pub fn transfer(&self, verb: Verb, other: Spot, len: usize) -> Result<()> {
        self.post(&[whole(verb, other, len)])?;
        self.wait()
    }

    /// Waits for a completion.
    ///
    /// # Errors
    /// As of [`Self::poll`].
    pub fn wait(&self) -> Result<()> {
        while !self.poll()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Moves the whole buffer `count` times, with `depth` requests under way.
    ///
    /// # Errors
    /// As of [`Self::post`] and [`Self::poll`].
    pub fn stream(&self, verb: Verb, other: Spot, count: usize, depth: usize) -> Result<()> {
        ensure!(depth <= DEPTH, "at most {DEPTH} at a time");
        let (mut begun, mut done) = (0, 0);
        while done < count {
            while begun < count && begun - done < depth {
                self.post(&[whole(verb, other, self.buffer.memory.len())])?;
                begun += 1;
            }
            while self.poll()? {
                done += 1;
            }
        }
        Ok(())
    }

    /// Posts requests, at most [`CHAIN`] by one call. At most [`DEPTH`] may be under way.
    ///
    /// # Errors
    /// If there are too many, one is not in the buffer, or the queue pair is full or has failed.
    pub fn post(&self, requests: &[Request]) -> Result<()> {
        match requests.len() {
            0 => Ok(()),
            1 => self.post_chain::<1>(requests),
            _ => self.post_chain::<CHAIN>(requests),
        }
    }

    /// Posts at least one request and at most `N`, from the stack: it is timed, and nothing is allocated.
    fn post_chain<const N: usize>(&self, requests: &[Request]) -> Result<()> {
        ensure!(requests.len() <= N, "more than {N} requests in a chain");
        let mut pieces = [ibv_sge::default(); N];
        for (piece, request) in pieces.iter_mut().zip(requests) {
            *piece = self.piece(request.at, request.len)?;
        }
        // SAFETY: zero is a request of opcode 0 and nothing else; pointers and unions allow it.
        let mut chain: [ibv_send_wr; N] = unsafe { zeroed() };
        // All pointers come from these, which are the only borrows until the chain is posted.
        let (piece, first) = (pieces.as_mut_ptr(), chain.as_mut_ptr());
        for (i, request) in requests.iter().enumerate() {
            // SAFETY: there are as many as requests at least.
            unsafe {
                fill(&mut *first.add(i), request, piece.add(i));
                if i > 0 {
                    (*first.add(i - 1)).next = first.add(i);
                }
            }
        }
        self.post_first(first)
    }

    /// Receives one message to `len` bytes of the buffer from `at` on. One at a time may be waited for.
    ///
    /// # Errors
    /// If they are not in the buffer, or another is waited for.
    pub fn receive(&self, at: usize, len: usize) -> Result<()> {
        let mut piece = self.piece(at, len)?;
        let mut request = ibv_recv_wr {
            sg_list: &mut piece,
            num_sge: 1,
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: all objects are live, and the request and its list too; the memory stays for as long as the pair.
        let code = unsafe {
            let post = self.buffer.device.context.as_ref().ops.post_recv;
            post.context("no post_recv")?(self.qp.as_ptr(), &mut request, &mut bad)
        };
        done(code).context("posting that a message is received")
    }

    fn piece(&self, at: usize, len: usize) -> Result<ibv_sge> {
        let end = at.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.buffer.memory.len()),
            "more than the buffer has"
        );
        Ok(ibv_sge {
            addr: self.end.spot.addr + at as u64,
            length: u32::try_from(len)?,
            // SAFETY: the memory region is live.
            lkey: unsafe { self.buffer.mr.as_ref() }.lkey,
        })
    }

    fn post_first(&self, request: *mut ibv_send_wr) -> Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: all objects are live, and the requests and their lists too; the memory stays for as long as the pair.
        let code = unsafe {
            let post = self.buffer.device.context.as_ref().ops.post_send;
            post.context("no post_send")?(self.qp.as_ptr(), request, &mut bad)
        };
        done(code).context("posting a request")
    }

    /// Returns `true` if a request has completed.
    ///
    /// # Errors
    /// If it has failed.
    pub fn poll(&self) -> Result<bool> {
        // SAFETY: the device is open.
        let poll = unsafe { self.buffer.device.context.as_ref() }.ops.poll_cq;
        let poll = poll.context("no poll_cq")?;
        // SAFETY: it is plain numbers.
        let mut completion: ibv_wc = unsafe { zeroed() };
        // SAFETY: the queue is live, and there is room for one completion.
        match unsafe { poll(self.buffer.device.cq.as_ptr(), 1, &mut completion) } {
            0 => Ok(false),
            1 if completion.status == IBV_WC_SUCCESS => Ok(true),
            1 => {
                // SAFETY: the function returns a constant string for any status.
                let why = unsafe { CStr::from_ptr(ibv_wc_status_str(completion.status)) };
                bail!("a request failed: {}", why.to_string_lossy());
            }
            _ => bail!("polling the completion queue failed"),
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: we own them, and what uses another goes first. Failures leave them to the exit.
        unsafe {
            ibv_destroy_qp(self.qp.as_ptr());
        }
    }
}

fn whole(verb: Verb, spot: Spot, len: usize) -> Request {
    Request {
        verb,
        at: 0,
        len,
        spot,
        signalled: true,
    }
}

/// Makes a request, which is zero, as libibverbs has it.
fn fill(raw: &mut ibv_send_wr, request: &Request, piece: *mut ibv_sge) {
    (raw.sg_list, raw.num_sge) = (piece, 1);
    raw.send_flags = if request.signalled {
        IBV_SEND_SIGNALED
    } else {
        0
    };
    let Spot { addr, rkey } = request.spot;
    let (opcode, operands) = match request.verb {
        Verb::Send => (IBV_WR_SEND, None),
        Verb::Write => (IBV_WR_RDMA_WRITE, None),
        Verb::Read => (IBV_WR_RDMA_READ, None),
        Verb::CompareSwap { expected, new } => (IBV_WR_ATOMIC_CMP_AND_SWP, Some((expected, new))),
        Verb::FetchAdd { operand } => (IBV_WR_ATOMIC_FETCH_AND_ADD, Some((operand, 0))),
    };
    raw.opcode = opcode;
    match operands {
        None => (raw.wr.rdma.remote_addr, raw.wr.rdma.rkey) = (addr, rkey),
        Some((compare_add, swap)) => {
            (raw.wr.atomic.remote_addr, raw.wr.atomic.rkey) = (addr, rkey);
            (raw.wr.atomic.compare_add, raw.wr.atomic.swap) = (compare_add, swap);
        }
    }
}

fn nothing() -> ibv_qp_attr {
    // SAFETY: it is plain numbers.
    unsafe { zeroed() }
}

fn nothing_at_all() -> ibv_ah_attr {
    // SAFETY: it is plain numbers.
    unsafe { zeroed() }
}

fn qp_of(cq: NonNull<ibv_cq>) -> ibv_qp_init_attr {
    // SAFETY: it is plain numbers, and pointers that may be null.
    let mut attr: ibv_qp_init_attr = unsafe { zeroed() };
    (attr.send_cq, attr.recv_cq) = (cq.as_ptr(), cq.as_ptr());
    attr.qp_type = IBV_QPT_RC;
    attr.cap.max_send_wr = DEPTH as u32;
    attr.cap.max_recv_wr = 1;
    attr.cap.max_send_sge = 1;
    attr.cap.max_recv_sge = 1;
    attr
}

fn open(name: &str) -> Result<NonNull<ibv_context>> {
    let mut count = 0;
    // SAFETY: the list has `count` devices, and is freed when the one that matters is open.
    unsafe {
        let list = made(ibv_get_device_list(&mut count), "the list of devices")?;
        let devices = std::slice::from_raw_parts(list.as_ptr(), usize::try_from(count)?);
        let named = |&&device: &&*mut ibv_device| {
            let found = CStr::from_ptr(ibv_get_device_name(device));
            name.is_empty() || found.to_bytes() == name.as_bytes()
        };
        let context = match devices.iter().find(named) {
            Some(&device) => made(ibv_open_device(device), "a device context"),
            None => Err(anyhow!("no RDMA device {name}")),
        };
        ibv_free_device_list(list.as_ptr());
        context
    }
}

fn port(context: NonNull<ibv_context>) -> Result<ibv_port_attr> {
    // SAFETY: it is plain numbers.
    let mut attr: ibv_port_attr = unsafe { zeroed() };
    // SAFETY: the function writes the first part of the structure, all that its oldest form had.
    let code = unsafe { ibv_query_port(context.as_ptr(), PORT, ptr::from_mut(&mut attr).cast()) };
    done(code).context("looking at the port")?;
    Ok(attr)
}

/// The GID that stands for an IPv4 address, or else the first.
fn gid(context: NonNull<ibv_context>) -> Result<(u8, [u8; 16])> {
    let at = |index| {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the device is open, and there is room for a GID.
        let code = unsafe { ibv_query_gid(context.as_ptr(), PORT, index, &mut gid) };
        // SAFETY: any bytes are bytes.
        (code == 0).then_some((index as u8, unsafe { gid.raw }))
    };
    let all: Vec<_> = (0..GIDS).map_while(at).collect();
    choose(&all).context("the port has no GID")
}

fn choose(gids: &[(u8, [u8; 16])]) -> Option<(u8, [u8; 16])> {
    let is_ipv4 = |raw: &[u8; 16]| std::net::Ipv6Addr::from(*raw).to_ipv4_mapped().is_some();
    // Of one address there are two with RoCE, of version 1 and then 2.
    let ipv4 = gids.iter().rfind(|(_, raw)| is_ipv4(raw));
    let any = gids.iter().find(|(_, raw)| *raw != [0; 16]);
    ipv4.or(any).copied()
}

fn made<T>(object: *mut T, what: &str) -> Result<NonNull<T>> {
    let error = io::Error::last_os_error();
    NonNull::new(object).ok_or_else(|| anyhow!("making {what}: {error}"))
}

fn done(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        code if code > 0 => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gid_of_an_ipv4_address_is_preferred() {
        let link = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        let four = std::net::Ipv4Addr::new(10, 77, 0, 1)
            .to_ipv6_mapped()
            .octets();
        assert_eq!(
            choose(&[(0, link), (1, four), (2, [0; 16])]),
            Some((1, four))
        );
        assert_eq!(choose(&[(0, [0; 16]), (1, link)]), Some((1, link)));
        assert_eq!(choose(&[(0, [0; 16])]), None);
    }

    #[test]
    fn codes_are_errors() {
        assert!(done(0).is_ok());
        assert_eq!(done(22).unwrap_err().raw_os_error(), Some(22));
        assert!(made(ptr::null_mut::<u8>(), "nothing").is_err());
    }
}
