// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Page faults: the device requests absent pages of a key from the driver. The driver makes them present and resumes
//! the device.
//!
//! An access to an absent page raises an event and keeps the state of the queue. A send queue and a response to a READ
//! continue after the reply of the driver. The responder sends an RNR NAK for a request of a peer, and the peer must
//! retry. Faults use the memory scheme: the event has key and address, and no work request.

use crate::device::Device;
use crate::object::eq::Event;
use crate::object::mkey::{Absent, MkeyFault};

/// Maximum size of one page request.
const MAX_REQUEST_BYTES: u64 = 4 << 20;

/// Page request to the driver.
#[derive(Clone, Debug)]
struct PageRequest {
    token: u64,
    key: u32,
    address: u64,
    /// Numbers of queue pairs and DC targets that wait for the pages.
    waiting: Vec<u32>,
}

/// Page requests in flight.
#[derive(Debug, Default)]
pub struct PageFaultState {
    requests: Vec<PageRequest>,
    last: u64,
    /// Queue pair or DC target, key and address of requests that the driver has rejected. The next access of the queue
    /// pair or target to the address fails and removes the entry.
    unresolved: Vec<(u32, u32, u64)>,
}

/// Requests the memory of `fault` from the driver if the memory is absent. Returns `true` if the queue pair or DC
/// target must wait for the memory: the reply of the driver schedules its turn.
pub fn request_absent(device: &mut Device, number: u32, fault: MkeyFault) -> bool {
    let MkeyFault::Absent(absent) = fault else {
        return false;
    };
    let state = &mut device.engine.faults;
    let own = (number, absent.key, absent.address);
    if let Some(at) = state
        .unresolved
        .iter()
        .position(|unresolved| *unresolved == own)
    {
        state.unresolved.swap_remove(at);
        return false;
    }
    let same =
        |request: &&mut PageRequest| (request.key, request.address) == (absent.key, absent.address);
    if let Some(request) = state.requests.iter_mut().find(same) {
        if !request.waiting.contains(&number) {
            request.waiting.push(number);
        }
        return true;
    }
    raise_event(device, number, absent)
}

/// Returns `true` if a queue pair or DC target waits for a page request.
pub fn is_waiting(device: &Device, number: u32) -> bool {
    let mut requests = device.engine.faults.requests.iter();
    requests.any(|request| request.waiting.contains(&number))
}

/// Removes a queue pair or DC target from all page requests, after its reset or destruction.
pub fn cancel_waits(device: &mut Device, number: u32) {
    let state = &mut device.engine.faults;
    state
        .unresolved
        .retain(|(unresolved, _, _)| *unresolved != number);
    for request in &mut state.requests {
        request.waiting.retain(|waiting| *waiting != number);
    }
}

/// Raises a page fault event. Returns `false` if page faults are disabled or no event queue subscribes to them.
fn raise_event(device: &mut Device, number: u32, absent: Absent) -> bool {
    let state = &mut device.engine.faults;
    let token = state.last + 1;
    let event = Event::PageFault {
        token,
        key: absent.key,
        address: absent.address,
        length: absent.length.min(MAX_REQUEST_BYTES) as u32,
    };
    let is_subscribed = device
        .objects
        .eqs
        .iter()
        .any(|(_, eq)| eq.subscribes_to(event));
    if !device.firmware.settings.page_faults || !is_subscribed {
        return false;
    }
    state.last = token;
    state.requests.push(PageRequest {
        token,
        key: absent.key,
        address: absent.address,
        waiting: vec![number],
    });
    device.event(event);
    true
}

/// Handles the reply of the driver to a page request. `is_present` is `false` if the driver has no memory for it.
/// Returns `None` if no request has this token.
pub fn complete_request(device: &mut Device, token: u64, is_present: bool) -> Option<()> {
    let state = &mut device.engine.faults;
    let at = state
        .requests
        .iter()
        .position(|request| request.token == token)?;
    let request = state.requests.swap_remove(at);
    if !is_present {
        let waiting = request.waiting.iter();
        let unresolved = waiting.map(|number| (*number, request.key, request.address));
        state.unresolved.extend(unresolved);
    }
    for number in request.waiting {
        device.engine.wake(number);
    }
    Some(())
}
