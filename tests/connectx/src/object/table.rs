// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Table of objects by number. Firmware allocates the numbers. A freed number is reused as late as possible, so that
//! the use of a stale number fails.

use std::collections::VecDeque;

/// Table of objects of one kind.
#[derive(Debug)]
pub struct Table<T> {
    first: u32,
    limit: usize,
    slots: Vec<Option<Box<T>>>,
    free: VecDeque<u32>,
}

impl<T> Table<T> {
    /// Returns a table for at most `limit` objects, with numbers from `first`.
    pub fn new(first: u32, limit: usize) -> Self {
        Table {
            first,
            limit,
            slots: Vec::new(),
            free: VecDeque::new(),
        }
    }

    /// Inserts the object that `make` returns for its number. Returns `None` if the table is full.
    pub fn insert_with(&mut self, make: impl FnOnce(u32) -> T) -> Option<u32> {
        let number = if self.slots.len() < self.limit {
            self.slots.push(None);
            self.first + self.slots.len() as u32 - 1
        } else {
            self.free.pop_front()?
        };
        let slot = self.slot(number)?;
        self.slots[slot] = Some(Box::new(make(number)));
        Some(number)
    }

    /// Inserts an object and returns its number. Returns `None` if the table is full.
    pub fn insert(&mut self, object: T) -> Option<u32> {
        self.insert_with(|_| object)
    }

    /// Returns the object with this number.
    pub fn get(&self, number: u32) -> Option<&T> {
        self.slots.get(self.slot(number)?)?.as_deref()
    }

    /// Returns the object with this number.
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.as_deref_mut()
    }

    /// Removes the object with this number.
    pub fn remove(&mut self, number: u32) -> Option<T> {
        let slot = self.slot(number)?;
        let object = self.slots.get_mut(slot)?.take()?;
        self.free.push_back(number);
        Some(*object)
    }

    /// Removes the object with this number temporarily. The caller must call [`Table::put_back`].
    pub fn take(&mut self, number: u32) -> Option<Box<T>> {
        let slot = self.slot(number)?;
        self.slots.get_mut(slot)?.take()
    }

    /// Puts an object back that [`Table::take`] has removed.
    pub fn put_back(&mut self, number: u32, object: Box<T>) {
        if let Some(slot) = self.slot(number) {
            self.slots[slot] = Some(object);
        }
    }

    /// Returns all objects with their numbers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let numbered = (self.first..).zip(&self.slots);
        numbered.filter_map(|(number, slot)| Some((number, slot.as_deref()?)))
    }

    /// Returns all objects with their numbers, in order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut T)> {
        let numbered = (self.first..).zip(&mut self.slots);
        numbered.filter_map(|(number, slot)| Some((number, slot.as_deref_mut()?)))
    }

    /// Returns the number of objects.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns `true` if the table is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn slot(&self, number: u32) -> Option<usize> {
        number.checked_sub(self.first).map(|slot| slot as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_number_is_reused_last() {
        let mut table = Table::new(5, 3);
        assert_eq!([table.insert('a'), table.insert('b')], [Some(5), Some(6)]);
        assert_eq!(table.remove(5), Some('a'));
        assert_eq!(table.get(5), None);
        assert_eq!([table.insert('c'), table.insert('d')], [Some(7), Some(5)]);
        assert_eq!(table.insert('e'), None);
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn unallocated_number_finds_nothing() {
        let mut table = Table::new(5, 3);
        table.insert(());
        for number in [0, 4, 6, u32::MAX] {
            assert_eq!(table.get(number), None);
            assert_eq!(table.remove(number), None);
        }
    }
}
