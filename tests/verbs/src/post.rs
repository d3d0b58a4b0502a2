// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Posting of requests and polling for their completions.

use std::ffi::CStr;
use std::mem::zeroed;
use std::ptr;

use anyhow::{bail, ensure, Context, Result};

use crate::raw::*;
use crate::{check_code, Qp, RemoteAddr, Request, Verb, CHAIN_MAX, DEPTH};

impl Qp {
    /// Executes one request for the first `len` bytes of the buffer, and polls for its completion.
    ///
    /// # Errors
    /// See [`Self::post`] and [`Self::poll`].
    pub fn transfer(&self, verb: Verb, remote: RemoteAddr, len: usize) -> Result<()> {
        self.post(&[Request::from_start(verb, remote, len)])?;
        self.wait()
    }

    /// Polls until a completion arrives.
    ///
    /// # Errors
    /// See [`Self::poll`].
    pub fn wait(&self) -> Result<()> {
        while !self.poll()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Executes `count` requests for the whole buffer, with `depth` in flight.
    ///
    /// # Errors
    /// See [`Self::post`] and [`Self::poll`].
    pub fn stream(&self, verb: Verb, remote: RemoteAddr, count: usize, depth: usize) -> Result<()> {
        ensure!(depth <= DEPTH, "depth {depth} exceeds {DEPTH}");
        let (mut posted, mut completed) = (0, 0);
        while completed < count {
            while posted < count && posted - completed < depth {
                self.post(&[Request::from_start(verb, remote, self.buffer.memory.len())])?;
                posted += 1;
            }
            while self.poll()? {
                completed += 1;
            }
        }
        Ok(())
    }

    /// Posts at most [`CHAIN_MAX`] requests with one doorbell. At most [`DEPTH`] may be in flight.
    ///
    /// # Errors
    /// - There are more than [`CHAIN_MAX`] requests.
    /// - A request exceeds the buffer.
    /// - The send queue is full, or the QP is in the error state.
    pub fn post(&self, requests: &[Request]) -> Result<()> {
        match requests.len() {
            0 => Ok(()),
            1 => self.post_chain::<1>(requests),
            _ => self.post_chain::<CHAIN_MAX>(requests),
        }
    }

    /// Posts 1 to `N` requests. The work requests are on the stack: an allocation would count in measured times.
    fn post_chain<const N: usize>(&self, requests: &[Request]) -> Result<()> {
        ensure!(
            requests.len() <= N,
            "{} requests in a chain, at most {N}",
            requests.len()
        );
        let mut sges = [ibv_sge::default(); N];
        for (sge, request) in sges.iter_mut().zip(requests) {
            *sge = self.sge(request.offset, request.len)?;
        }
        // SAFETY: zero is valid for integers, unions of integers, and pointers that may be null.
        let mut chain: [ibv_send_wr; N] = unsafe { zeroed() };
        // The chain has raw pointers to both arrays, so they must not be borrowed until the chain is posted.
        let (sge, first) = (sges.as_mut_ptr(), chain.as_mut_ptr());
        for (i, request) in requests.iter().enumerate() {
            // SAFETY: both arrays have at least as many elements as `requests`.
            unsafe {
                request.fill(&mut *first.add(i), sge.add(i));
                if i > 0 {
                    (*first.add(i - 1)).next = first.add(i);
                }
            }
        }
        self.post_first(first)
    }

    /// Posts a receive for one message of at most `len` bytes, to `offset` in the buffer.
    ///
    /// # Errors
    /// The range exceeds the buffer, or another receive is posted.
    pub fn receive(&self, offset: usize, len: usize) -> Result<()> {
        let mut sge = self.sge(offset, len)?;
        let mut request = ibv_recv_wr {
            sg_list: &mut sge,
            num_sge: 1,
            ..Default::default()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: all objects are live, and the request and its SGE too. The buffer outlives the QP.
        let code = unsafe {
            let post = self.buffer.device.context.as_ref().ops.post_recv;
            post.context("no post_recv")?(self.qp.as_ptr(), &mut request, &mut bad)
        };
        check_code(code).context("posting a receive")
    }

    fn sge(&self, offset: usize, len: usize) -> Result<ibv_sge> {
        let end = offset.checked_add(len);
        ensure!(
            end.is_some_and(|end| end <= self.buffer.memory.len()),
            "range exceeds the buffer"
        );
        Ok(ibv_sge {
            addr: self.address.remote_addr.addr + offset as u64,
            length: u32::try_from(len)?,
            // SAFETY: the MR is live.
            lkey: unsafe { self.buffer.mr.as_ref() }.lkey,
        })
    }

    fn post_first(&self, request: *mut ibv_send_wr) -> Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: all objects are live, and the requests and their SGEs too. The buffer outlives the QP.
        let code = unsafe {
            let post = self.buffer.device.context.as_ref().ops.post_send;
            post.context("no post_send")?(self.qp.as_ptr(), request, &mut bad)
        };
        check_code(code).context("posting a request")
    }

    /// Polls the CQ once. Returns `true` if a request has completed.
    ///
    /// # Errors
    /// The request has failed, or the CQ cannot be polled.
    pub fn poll(&self) -> Result<bool> {
        // SAFETY: the device is open.
        let poll = unsafe { self.buffer.device.context.as_ref() }.ops.poll_cq;
        let poll = poll.context("no poll_cq")?;
        // SAFETY: zero is valid for all fields.
        let mut completion: ibv_wc = unsafe { zeroed() };
        // SAFETY: the CQ is live, and `completion` can be written.
        match unsafe { poll(self.buffer.device.cq.as_ptr(), 1, &mut completion) } {
            0 => Ok(false),
            1 if completion.status == IBV_WC_SUCCESS => Ok(true),
            1 => {
                // SAFETY: the function returns a constant string for any status.
                let status = unsafe { CStr::from_ptr(ibv_wc_status_str(completion.status)) };
                bail!("request failed: {}", status.to_string_lossy());
            }
            _ => bail!("polling the CQ failed"),
        }
    }
}
