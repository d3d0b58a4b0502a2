// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Page faults: the device requests absent memory of a key from the driver, which makes it present and resumes the
//! device.
//!
//! A queue that meets an absent page raises an event and keeps its state. A send queue and a response to a READ
//! continue when the driver has answered. A request of a peer is answered with an RNR NAK, as if no receive had been
//! posted, and must be sent again. The faults are of the device's memory scheme: the event has the key and the
//! address, and does not name the work request.

use crate::device::Device;
use crate::object::eq::Event;
use crate::object::mkey::{Absent, MkeyFault};

/// Maximum number of bytes of one request.
const LIMIT: u64 = 4 << 20;

/// Request to the driver.
#[derive(Clone, Debug)]
struct PageRequest {
    token: u64,
    key: u32,
    address: u64,
    /// Queue pairs and DC targets that go on with it.
    waiting: Vec<u32>,
}

/// Requests that the driver has not answered.
#[derive(Debug, Default)]
pub struct PageFaultState {
    requests: Vec<PageRequest>,
    last: u64,
    /// Queue pair or DC target, key and address for which the driver has answered that there is no memory. An entry is
    /// removed when the queue pair or target accesses the address again.
    refused: Vec<(u32, u32, u64)>,
}

/// Requests the memory of `fault` from the driver if it is absent. Returns `true` if the queue pair or DC target must
/// wait for the memory. It gets its turn when the driver has answered.
pub fn waits(device: &mut Device, number: u32, fault: MkeyFault) -> bool {
    let MkeyFault::Absent(absent) = fault else {
        return false;
    };
    let state = &mut device.engine.faults;
    let own = (number, absent.key, absent.address);
    if let Some(at) = state.refused.iter().position(|refused| *refused == own) {
        state.refused.swap_remove(at);
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
    ask(device, number, absent)
}

/// Returns `true` if a queue pair or DC target waits for the driver.
pub fn is_waiting(device: &Device, number: u32) -> bool {
    let mut requests = device.engine.faults.requests.iter();
    requests.any(|request| request.waiting.contains(&number))
}

/// A queue pair or DC target is reset or gone, and waits for nothing.
pub fn forget(device: &mut Device, number: u32) {
    let state = &mut device.engine.faults;
    state.refused.retain(|(refused, _, _)| *refused != number);
    for request in &mut state.requests {
        request.waiting.retain(|waiting| *waiting != number);
    }
}

/// Asks the driver. Returns whether it listens.
fn ask(device: &mut Device, number: u32, absent: Absent) -> bool {
    let state = &mut device.engine.faults;
    let token = state.last + 1;
    let event = Event::PageFault {
        token,
        key: absent.key,
        address: absent.address,
        length: absent.length.min(LIMIT) as u32,
    };
    let is_heard = device.objects.eqs.iter().any(|(_, eq)| eq.wants(event));
    if !device.firmware.settings.page_faults || !is_heard {
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

/// The driver has answered: the memory is there, or there is none. Returns `None` if it was not asked.
pub fn resume(device: &mut Device, token: u64, is_there: bool) -> Option<()> {
    let state = &mut device.engine.faults;
    let at = state
        .requests
        .iter()
        .position(|request| request.token == token)?;
    let request = state.requests.swap_remove(at);
    if !is_there {
        let waiting = request.waiting.iter();
        let refused = waiting.map(|number| (*number, request.key, request.address));
        state.refused.extend(refused);
    }
    for number in request.waiting {
        device.engine.wake(number);
    }
    Some(())
}
