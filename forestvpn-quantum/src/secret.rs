//! Memory that holds expanded keys: on the heap, so that moving the owner copies nothing, and wiped on drop.
#![expect(unsafe_code, reason = "wiping a foreign type's bytes has no safe form")]

use core::mem::ManuallyDrop;
use core::ops::Deref;

use zeroize::Zeroize;

/// A value of a foreign type (a cipher's key schedule) whose bytes are overwritten with zeros on drop.
pub(crate) struct Wiped<T>(ManuallyDrop<Box<T>>);

impl<T> Wiped<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(Box::new(value)))
    }
}

impl<T> Deref for Wiped<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> Drop for Wiped<T> {
    fn drop(&mut self) {
        // SAFETY: the box is taken out exactly once, here, and `self.0` is not touched afterwards.
        let raw = Box::into_raw(unsafe { ManuallyDrop::take(&mut self.0) });
        // SAFETY: `raw` came from `Box::into_raw`, is valid and aligned. The value is dropped in place once;
        // after that its storage is plain bytes, is overwritten through a `MaybeUninit` view, and is given
        // back to the allocator as `Box<MaybeUninit<T>>`, which has the same layout and drops nothing.
        unsafe {
            core::ptr::drop_in_place(raw);
            let mut bytes = Box::from_raw(raw.cast::<core::mem::MaybeUninit<T>>());
            bytes.zeroize();
        }
    }
}
